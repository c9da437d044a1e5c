"""The interpreter allows addresses within the launch's tensors and no others."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_verify.oracles.problem import Problem  # noqa: E402
from fa_verify.properties.guarantees.claims import accuracy  # noqa: E402
from fa_verify.properties.kernels.subject import Subject  # noqa: E402
from fa_verify.properties.running.tally import Tally  # noqa: E402
from fa_verify.properties.search.search import Runner  # noqa: E402
from fa_verify.simulator.interpreter.addresses import OutOfBoundsError  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"
)


@triton.jit
def copy(x_ptr, y_ptr, first, count, BLOCK: tl.constexpr):
    offs = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < count, other=0.0), mask=offs < count)


@triton.jit
def add(x_ptr, at):
    tl.atomic_add(x_ptr + at, 1.0)


@triton.jit
def swap(x_ptr, at):
    tl.atomic_cas(x_ptr + at, 0, 1)


@triton.jit
def load_all(x_ptr, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, BLOCK))


@triton.jit
def load_lengths(bias_ptr, seqlens_ptr, at):
    tl.load(seqlens_ptr + at)


@triton.jit
def load_of_tuple(pointers, at):
    tl.load(pointers[1] + at)


@triton.jit
def load_at(address_ptr):
    tl.load(tl.load(address_ptr).to(tl.pointer_type(tl.float32)))


@triton.jit
def copy_of_two(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    """The first half of z is of x, the second of y; both halves are stored at once, backwards."""
    offs = tl.arange(0, BLOCK)
    pointers = tl.where(offs < BLOCK // 2, x_ptr + offs, y_ptr + offs)
    tl.store(z_ptr + (BLOCK - 1 - offs), tl.load(pointers))


@triton.jit
def copy_bytes(x_ptr, y_ptr, x_byte, y_byte, BLOCK: tl.constexpr):
    """Copies int32 from and to any bytes."""
    offs = tl.arange(0, BLOCK)
    x = (x_ptr + x_byte).to(tl.pointer_type(tl.int32))
    y = (y_ptr + y_byte).to(tl.pointer_type(tl.int32))
    tl.store(y + offs, tl.load(x + offs))


@triton.jit
def copy_transposed(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    """Copies x (M, N) to y (N, M), where y has ones beyond."""
    offs = tl.arange(0, BLOCK)
    inside = (offs[:, None] < M) & (offs[None, :] < N)
    x = tl.load(x_ptr + offs[:, None] * N + offs[None, :], mask=inside, other=1)
    tl.store(y_ptr + (offs[:, None] * BLOCK + offs[None, :]), tl.trans(x))


@triton.jit
def copy_if(x_ptr, y_ptr, flag, BLOCK: tl.constexpr):
    """Copies 3 elements and a zero if the flag is 1, nothing otherwise."""
    offs = tl.arange(0, BLOCK)
    mask = (flag == 1) & (offs < 3)
    x = tl.load(x_ptr + offs, mask=mask, other=0)
    tl.store(y_ptr + offs, x, mask=(flag == 1) & (offs < 4))


def refused(run) -> str:
    """The message of the error that a kernel raises."""
    with pytest.raises(Exception, match="OutOfBounds") as info:
        run()
    assert isinstance(info.value.__cause__, OutOfBoundsError)
    return str(info.value.__cause__)


def test_every_element_of_a_tensor_can_be_read_and_written():
    x, y = torch.arange(20.0), torch.zeros(20)
    copy[(1,)](x, y, 0, 20, 32)
    assert torch.equal(x, y)


def test_a_read_past_the_end_names_the_tensor_and_how_far():
    x = torch.zeros(20)
    said = refused(lambda: copy[(1,)](x, torch.zeros(40), 0, 22, 32))
    # Another tensor may be nearby in memory.
    assert said.startswith("reads 2 of 22 elements outside of the tensors of its launch")
    said = refused(lambda: load_all[(1,)](x, 32))
    assert said.endswith("the first 0 bytes past the end of x_ptr, shape (20,)")


def test_a_tensor_that_is_several_arguments_has_all_of_their_names():
    """A launch without a bias passes the lengths for it; only the lengths are read."""
    lengths = torch.zeros(4, dtype=torch.int32)
    said = refused(lambda: load_lengths[(1,)](lengths, lengths, 4))
    assert said.endswith(
        "the first 0 bytes past the end of bias_ptr, shape (4,) or seqlens_ptr, shape (4,)"
    )
    said = refused(lambda: load_lengths[(1,)](lengths, lengths, -3))
    assert said.endswith(
        "the first 12 bytes before bias_ptr, shape (4,) or seqlens_ptr, shape (4,)"
    )


def test_a_read_before_the_start_is_refused():
    base = torch.zeros(64)
    said = refused(lambda: copy[(1,)](base[32:], base[32:], -3, 8, 16))
    assert said.startswith("reads 3 of 11 elements")
    assert said.endswith("the first 12 bytes before x_ptr, shape (32,) or y_ptr, shape (32,)")


def test_a_write_past_the_end_is_refused_and_not_made():
    base = torch.zeros(64)
    said = refused(lambda: copy[(1,)](torch.ones(64), base[:20], 0, 24, 32))
    assert said.startswith("writes 4 of 24 elements")
    assert not base[20:].any()


def test_lanes_that_are_masked_off_may_point_anywhere():
    x = torch.zeros(20)
    copy[(1,)](x, x, 2**40, 20, 32)


def test_the_gaps_between_the_rows_of_a_tensor_count_as_its_own():
    base = torch.zeros(4, 32)
    load_all[(1,)](base[:, :8], 64)


def test_parts_of_one_storage_are_told_apart_from_what_lies_around_them():
    packed = torch.zeros(48)
    copy[(1,)](packed[:16], packed[16:32], 0, 16, 16)
    assert "reads 16 of 32" in refused(lambda: load_all[(1,)](packed[:16], 32))


def test_a_part_does_not_cut_short_what_it_is_a_part_of():
    whole = torch.zeros(64)
    load_of_tuple[(1,)]((whole[8:16], whole), 63)


def test_one_load_can_read_from_several_tensors():
    x, y, z = torch.arange(16), torch.arange(100, 116), torch.zeros(16, dtype=torch.int64)
    copy_of_two[(1,)](x, y, z, 16)
    assert z.flip(0).tolist() == [*range(8), *range(108, 116)]


@pytest.mark.parametrize("bytes_", [(0, 0), (4, 8), (1, 0), (0, 3), (2, 2)])
def test_an_address_need_not_be_that_of_an_element_of_the_tensor(bytes_):
    x, y = torch.arange(64, dtype=torch.int8), torch.zeros(64, dtype=torch.int8)
    copy_bytes[(1,)](x, y, *bytes_, 8)
    first, place = bytes_
    assert y[place : place + 32].tolist() == x[first : first + 32].tolist()
    assert not y[:place].any()
    assert not y[place + 32 :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8])
def test_elements_are_read_and_written_in_the_order_of_their_lanes(dtype):
    x, y = torch.arange(35).reshape(5, 7).to(dtype), torch.zeros(8, 8, dtype=dtype)
    copy_transposed[(1,)](x, y, 5, 7, 8)
    assert torch.equal(y[:7, :5], x.T)
    assert (y[7:] == 1).all()
    assert (y[:, 5:] == 1).all()


@pytest.mark.parametrize("flag", [1, 2])
def test_the_mask_of_a_scalars_comparison_is_one_of_lanes(flag):
    x, y = torch.arange(5, 13), torch.full((8,), -1)
    copy_if[(1,)](x, y, flag, 8)
    assert y.tolist() == ([5, 6, 7, 0, -1, -1, -1, -1] if flag == 1 else [-1] * 8)


def test_a_finding_says_what_was_read_and_in_which_line_of_the_kernel():
    def attention(q, k, v, *, mask, sm_scale):
        load_all[(1,)](q, 64)

    runner = Runner(Subject.of(attention, "attention"), Tally())
    (finding,) = runner.findings(Problem(), accuracy)
    said, line = finding.raised.splitlines()
    assert said.startswith("OutOfBoundsError: reads 48 of 64 elements outside of the tensors")
    assert line.startswith(f"({__file__}, line ")


@pytest.mark.parametrize(("kernel", "dtype"), [(add, torch.float32), (swap, torch.int32)])
def test_an_atomic_outside_is_refused(kernel, dtype):
    base = torch.zeros(8, dtype=dtype)
    kernel[(1,)](base[:4], 3)
    assert base[3] == 1
    assert refused(lambda: kernel[(1,)](base[:4], 4)).startswith("updates 1 of 1")
    assert base[4] == 0


def test_tensors_in_a_tuple_are_the_launchs_own():
    pair = torch.zeros(4), torch.zeros(4)
    load_of_tuple[(1,)](pair, 3)
    # A read past the second could hit the first.
    base = torch.zeros(12)
    refused(lambda: load_of_tuple[(1,)]((base[4:8], base[:4]), 11))


def test_the_tensors_of_an_earlier_launch_are_not_those_of_this_one():
    base = torch.zeros(64)
    load_all[(1,)](base, 64)
    refused(lambda: load_all[(1,)](base[:32], 64))


def test_a_pointer_made_of_an_integer_may_point_anywhere():
    x = torch.zeros(1)
    load_at[(1,)](torch.tensor([x.data_ptr()]))


def test_an_empty_tensor_has_no_element_to_read():
    refused(lambda: load_all[(1,)](torch.zeros(0), 16))
