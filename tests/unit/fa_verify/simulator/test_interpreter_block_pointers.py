"""Block pointers work in the interpreter, though Triton 3.9 has removed them."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if not triton.knobs.runtime.interpret:
    pytest.skip("Triton 3.9 has no block pointers on a GPU", allow_module_level=True)

from fa_verify.simulator.interpreter import repair as repaired  # noqa: E402
from fa_verify.simulator.interpreter.addresses import OutOfBoundsError  # noqa: E402

repaired.repair()

InterpreterError = triton.runtime.errors.InterpreterError


@triton.jit
def transpose_kernel(
    X, Y, M, N, stride, start, BM: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Copies x (M, N) to y (N, M) from the row ``start`` on, by blocks of rows."""
    x = tl.make_block_ptr(X, (M, N), (stride, 1), (start, 0), (BM, BN), (1, 0))
    y = tl.make_block_ptr(
        base=Y, shape=(N, M), strides=(M, 1), offsets=(0, start), block_shape=(BN, BM),
        order=(0, 1),
    )  # fmt: skip
    for _ in range(start, M, BM):
        tile = tl.load(x, boundary_check=CHECK, padding_option=PADDING)
        tl.store(y, tl.trans(tile).to(y.type.element_ty.element_ty), boundary_check=(0, 1))
        x = tl.advance(x, (BM, 0))
        y = y.advance([0, BM])


@triton.jit
def load_kernel(X, Y, M, N, at, BM: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr,
                PADDING: tl.constexpr):  # fmt: skip
    """Loads the block at the row ``at``, and stores all of it."""
    x = tl.make_block_ptr(X, (M, N), (N, 1), (at, 0), (BM, BN), (1, 0))
    tile = tl.load(x, boundary_check=CHECK, padding_option=PADDING)
    tl.store(tl.make_block_ptr(Y, (BM, BN), (BN, 1), (0, 0), (BM, BN), (1, 0)), tile)


@triton.jit
def wrong_kernel(X, N, HOW: tl.constexpr):
    x = tl.make_block_ptr(X, (N,), (1,), (0,), (16,), (0,))
    if HOW == "mask":
        tl.load(x, mask=tl.arange(0, 16) < N)
    elif HOW == "axis":
        tl.load(x, boundary_check=(1,))
    elif HOW == "padding":
        tl.load(x, boundary_check=(0,), padding_option="one")
    elif HOW == "order":
        tl.make_block_ptr(X, (N,), (1,), (0,), (16,), (1,))
    elif HOW == "wide":
        tl.advance(x, (tl.full((), 3, tl.int64),))
    elif HOW == "dtype":
        tl.store(x, tl.zeros((16,), tl.float16))
    elif HOW == "shape":
        tl.store(x, tl.zeros((8,), tl.float32))
    elif HOW == "pointers":
        tl.load(X + tl.arange(0, 16), boundary_check=(0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize(("M", "N"), [(8, 16), (7, 9), (1, 1), (13, 16)])
def test_blocks_are_loaded_and_stored_where_they_lie(M, N, dtype):
    wide = torch.arange(M * (N + 3)).view(M, N + 3).to(dtype)
    y = torch.full((N, M), 99, dtype=dtype)
    transpose_kernel[(1,)](wide, y, M, N, N + 3, 0, BM=4, BN=16, CHECK=(0, 1), PADDING="zero")
    assert torch.equal(y, wide[:, :N].T)


@pytest.mark.parametrize(
    ("padding", "dtype", "outside"),
    [
        ("zero", torch.float32, 0.0), ("nan", torch.float32, float("nan")),
        ("zero", torch.bfloat16, 0.0), ("nan", torch.float16, float("nan")),
        ("", torch.float32, float("nan")), ("", torch.int32, 0x5A5A5A5A),
        ("zero", torch.int32, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [-1, 0, 2, 5])
def test_the_padding_lies_outside_of_the_tensor_alone(padding, dtype, outside, at):
    M, N, BM, BN = 3, 5, 4, 8
    x = torch.arange(1, 1 + M * N).view(M, N).to(dtype)
    y = torch.zeros(BM, BN, dtype=dtype)
    load_kernel[(1,)](x, y, M, N, at, BM=BM, BN=BN, CHECK=(0, 1), PADDING=padding)
    want = torch.full((BM, BN), outside, dtype=dtype)
    rows = [row for row in range(BM) if 0 <= at + row < M]
    for row in rows:
        want[row, :N] = x[at + row]
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("check", [(0,), 0, [-2]])
def test_a_dimension_that_is_not_checked_runs_on_in_memory(check):
    x = torch.arange(12.0).view(3, 4)
    y = torch.zeros(2, 8)
    load_kernel[(1,)](x, y, 3, 4, 0, BM=2, BN=8, CHECK=check, PADDING="zero")
    assert y.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("check", [(), (1,)])
def test_a_block_past_the_end_that_is_not_checked_is_out_of_bounds(check):
    x, y = torch.zeros(3, 4), torch.zeros(4, 4)
    with pytest.raises(InterpreterError) as info:
        load_kernel[(1,)](x, y, 3, 4, 0, BM=4, BN=4, CHECK=check, PADDING="zero")
    assert isinstance(info.value.__cause__, OutOfBoundsError)
    assert "past the end of X, shape (3, 4)" in str(info.value)


def test_a_shape_that_exceeds_the_tensor_is_out_of_bounds():
    x, y = torch.zeros(3, 4), torch.zeros(4, 4)
    with pytest.raises(InterpreterError, match="reads 4 of 16 elements outside"):
        load_kernel[(1,)](x, y, 4, 4, 0, BM=4, BN=4, CHECK=(0, 1), PADDING="zero")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", "mask and other need a block of pointers"), ("axis", "the block has 1 dim"),
        ("padding", "padding_option is .*one"), ("order", "each dimension once"),
        ("wide", "needs integers of 32 bits"), ("dtype", "its block has elements of fp32"),
        ("shape", "value has shape"), ("pointers", "need a block pointer"),
    ],
)  # fmt: skip
def test_what_triton_refuses_is_the_kernels_fault(how, message):
    with pytest.raises(InterpreterError, match=message):
        wrong_kernel[(1,)](torch.zeros(16), 16, HOW=how)
