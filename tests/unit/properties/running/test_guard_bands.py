"""Guard bands surround allocations, and a write outside a tensor is detected."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

from fa_verify.oracles.stream import normal
from fa_verify.properties.running.guard_bands import GuardBands

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels import flash_attention  # noqa: E402
from fa_kernels.launch.sizes import ROW_PADDING  # noqa: E402
from fa_kernels.runtime import allocation  # noqa: E402

SHAPE = (3, 5)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32)
FLOATS = (*DTYPES[:4], torch.complex64)
# Functions that allocate an uninitialised tensor like an existing one.
UNINITIALISED = {
    "empty": lambda x: torch.empty(SHAPE, dtype=x.dtype, device=x.device),
    "empty_of_no_axis": lambda x: torch.empty((), dtype=x.dtype, device=x.device),
    "empty_like": torch.empty_like,
    "empty_like_transposed": lambda x: torch.empty_like(x.T),
    "empty_strided": lambda x: torch.empty_strided(SHAPE, (8, 1), dtype=x.dtype, device=x.device),
    "empty_strided_columns": lambda x: torch.empty_strided(
        SHAPE, (1, 4), dtype=x.dtype, device=x.device
    ),
    "empty_permuted": lambda x: torch.empty_permuted(SHAPE, (1, 0), dtype=x.dtype, device=x.device),
    "new_empty": lambda x: x.new_empty(SHAPE),
    "new_empty_strided": lambda x: x.new_empty_strided(SHAPE, (10, 2)),
}
OF_ONE_VALUE = {
    "zeros": lambda x: torch.zeros(SHAPE, dtype=x.dtype, device=x.device),
    "zeros_like": lambda x: torch.zeros_like(x.T),
    "new_zeros": lambda x: x.new_zeros(SHAPE),
    "ones": lambda x: torch.ones(SHAPE, dtype=x.dtype, device=x.device),
    "ones_like": torch.ones_like,
    "new_ones": lambda x: x.new_ones(SHAPE),
    "full": lambda x: torch.full(SHAPE, 3, dtype=x.dtype, device=x.device),
    "full_like": lambda x: torch.full_like(x, 3),
    "new_full": lambda x: x.new_full(SHAPE, 3),
}
ALL = {**UNINITIALISED, **OF_ONE_VALUE}
every_way = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def source(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(SHAPE, dtype=dtype, device=device)


def guarded(make, device: str, dtype: torch.dtype = torch.float32):
    """(guards, tensor), with the tensor allocated within the guards."""
    x = source(device, dtype)
    with GuardBands() as guards:
        made = make(x)
    return guards, made


def write(x: torch.Tensor, offset: int) -> None:
    """Writes one element at an offset from the first element of x."""
    x.as_strided((), (), x.storage_offset() + offset).fill_(0)


def reach(x: torch.Tensor) -> int:
    """The number of elements in memory from the first of x to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_has_the_form_that_it_has_without_guards(make, dtype, device):
    guards, made = guarded(make, device, dtype)
    want = make(source(device, dtype))
    assert guards.count == 1
    for attribute in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, attribute) == getattr(want, attribute), attribute
    assert made.stride() == want.stride()


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_starts_at_an_address_that_wide_loads_can_use(make, dtype, device):
    _, made = guarded(make, device, dtype)
    assert made.data_ptr() % 16 == 0


@pytest.mark.parametrize("make", UNINITIALISED.values(), ids=UNINITIALISED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uninitialised_numbers_start_as_nan(make, dtype, device):
    _, made = guarded(make, device, dtype)
    assert made.isnan().all()


def test_uninitialised_integers_start_as_no_likely_value(device):
    _, made = guarded(UNINITIALISED["empty"], device, torch.int32)
    assert (made < -(2**30)).all()


@pytest.mark.parametrize("make", OF_ONE_VALUE.values(), ids=OF_ONE_VALUE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_one_value_keeps_it(make, dtype, device):
    _, made = guarded(make, device, dtype)
    assert torch.equal(made, make(source(device, dtype)))


@every_way
def test_writes_to_its_own_elements_are_no_overrun(make, device):
    guards, made = guarded(make, device)
    made.fill_(0)
    write(made, 0)
    write(made, reach(made) - 1)
    assert guards.overruns() == []


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_after_the_last_is_an_overrun(make, dtype, device):
    guards, made = guarded(make, device, dtype)
    write(made, reach(made))
    (found,) = guards.overruns()
    assert found.tensor.data_ptr() == made.data_ptr()
    assert found[1:] == (0, False)


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_before_the_first_is_an_overrun(make, dtype, device):
    guards, made = guarded(make, device, dtype)
    write(made, -1)
    (found,) = guards.overruns()
    assert found.tensor.data_ptr() == made.data_ptr()
    assert found[1:] == (-1, True)


@pytest.mark.parametrize(
    ("element", "offset"), [(15, 0), (17, 4 * 2), (15 + 255, 4 * 255), (-2, -5), (-256, -1021)]
)
def test_an_overrun_says_how_far_from_the_tensor_it_is(element, offset, device):
    guards, made = guarded(UNINITIALISED["empty"], device)
    write(made, element)
    assert [found.offset for found in guards.overruns()] == [offset]


def test_an_overrun_tells_the_written_byte_nearest_to_the_tensor(device):
    guards, made = guarded(UNINITIALISED["empty"], device)
    for element in (-9, -3, 18, 40):
        write(made, element)
    assert [found[1:] for found in guards.overruns()] == [(-9, True), (12, False)]


def test_each_tensor_has_bands_of_its_own(device):
    with GuardBands() as guards:
        made = [torch.empty(SHAPE, device=device) for _ in range(3)]
    write(made[2], -1)
    write(made[1], 15)
    assert [found.tensor.data_ptr() for found in guards.overruns()] == [
        x.data_ptr() for x in made[1:]
    ]


class OneTooMany(torch.autograd.Function):
    """The identity, whose backward writes past its allocation."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        made = torch.empty_like(gradient)
        made.copy_(gradient)
        write(made, made.numel())
        return made


def test_allocations_of_a_backward_have_guard_bands(device):
    x = source(device).requires_grad_()
    with GuardBands() as guards:
        out = OneTooMany.apply(x)
        (gradient,) = torch.autograd.grad(out, x, source(device))
    assert [found.tensor.data_ptr() for found in guards.overruns()] == [gradient.data_ptr()]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_a_tensor_without_elements_stays_as_it_is(shape, device):
    guards, made = guarded(lambda x: x.new_empty(shape), device)
    assert guards.count == 0
    assert made.shape == shape
    assert made.untyped_storage().nbytes() == 0


def test_a_sparse_tensor_stays_as_it_is():
    guards, made = guarded(lambda x: torch.empty(SHAPE, layout=torch.sparse_coo), "cpu")
    assert guards.count == 0
    assert made.layout is torch.sparse_coo


def test_a_tensor_without_memory_stays_as_it_is():
    guards, made = guarded(lambda x: torch.empty(SHAPE, device="meta"), "cpu")
    assert guards.count == 0
    assert made.is_meta


def raises_inside(guards: GuardBands) -> None:
    with guards:
        raise KeyError


@pytest.mark.parametrize("raises", [False, True], ids=["left", "raised_out_of"])
def test_outside_the_block_nothing_changes(raises, device):
    guards = GuardBands()
    if raises:
        with pytest.raises(KeyError):
            raises_inside(guards)
    else:
        with guards:
            pass
    made = torch.empty(SHAPE, device=device)
    assert guards.count == 0
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


def test_an_allocation_does_not_import_dynamo(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with GuardBands() as bands:
        torch.empty(3)
    assert bands.count == 1
    assert "torch._dynamo" not in sys.modules


def test_compiled_code_runs_compiled():
    compiled = []

    def backend(graph, _examples):
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x + x, backend=backend)
    with GuardBands():
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert len(compiled) == 1


class Doubled(HigherOrderOperator):
    """An operator that takes a function, like FlexAttention's."""

    def __call__(self, function, x):
        return super().__call__(function, x)


def test_operators_of_higher_order_are_not_refused():
    doubled = Doubled("doubled")
    doubled.fallthrough(DispatchKey.AutogradCPU)
    doubled.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda function, x: 2 * function(x))
    with GuardBands():
        got = doubled(torch.neg, torch.ones(3))
    assert torch.equal(got, torch.full((3,), -2.0))


@pytest.fixture
def library() -> torch.library.Library:
    """A library of operators with Python kernels, which are removed with it."""
    made = torch.library.Library("guarded", "DEF")
    for name in ("inner", "outer"):
        made.define(f"{name}(Tensor x) -> Tensor")
    made.impl("inner", torch.empty_like, "CompositeExplicitAutograd")
    for key in ("CPU", "CUDA"):
        made.impl("outer", lambda x: torch.ops.guarded.inner(x) + torch.empty_like(x), key)
    return made


def test_allocations_of_a_python_operator_have_guard_bands(library, device):
    x = source(device)
    with GuardBands() as guards:
        made = torch.ops.guarded.outer(x)
    assert guards.count == 2
    assert made.isnan().all()


@triton.jit
def fill_kernel(address, start, stop, BLOCK: tl.constexpr):
    """Writes 1 to x[start:stop]; the interpreter cannot bound an address given as an integer."""
    offs = start + tl.arange(0, BLOCK)
    tl.store(address.to(tl.pointer_type(tl.float32)) + offs, 1.0, mask=offs < stop)


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [(0, 5, []), (0, 6, [(0, False)]), (-1, 5, [(-1, True)]), (6, 7, [(4, False)])],
)
def test_a_store_of_a_kernel_beside_its_tensor_is_an_overrun(start, stop, found, device):
    with GuardBands() as guards:
        x = torch.empty(5, device=device)
        fill_kernel[(1,)](x.data_ptr(), start, stop, BLOCK=16)
    assert [overrun[1:] for overrun in guards.overruns()] == found


B, H, HK, M, N, D, DV = 1, 2, 1, 3, 5, 4, 6
# Tensors in the order of their allocation.
OURS = {
    "out": (B, H, M, DV),
    "lse": (B, H, M),
    "lse2": (B, H, ROW_PADDING),
    "delta": (B, H, ROW_PADDING),
    "dq": (B, H, M, D),
    "dk": (B, HK, N, D),
    "dv": (B, HK, N, DV),
}


def forward_and_backward(device: str) -> GuardBands:
    """Runs this project's kernels within guard bands."""
    shapes = {"q": (B, H, M, D), "k": (B, HK, N, D), "v": (B, HK, N, DV), "dout": (B, H, M, DV)}
    q, k, v, dout = (normal(0, x, shape, device).float() for x, shape in shapes.items())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with GuardBands() as guards:
        torch.autograd.grad(flash_attention(*leaves, config="16x16"), leaves, dout)
    return guards


@pytest.fixture
def allocated(monkeypatch) -> list[torch.Tensor]:
    """The allocations of fa_kernels, in order."""
    made = []
    empty = allocation.empty

    def record(*args: object, **kwargs: object) -> torch.Tensor:
        found = empty(*args, **kwargs)
        # Gradients that are not needed have no elements.
        made.extend([found] * (found.numel() > 0))
        return found

    monkeypatch.setattr(allocation, "empty", record)
    return made


def test_all_outputs_and_scratch_of_our_kernels_lie_between_bands(device, allocated):
    guards = forward_and_backward(device)
    assert [tuple(x.shape) for x in allocated] == list(OURS.values())
    assert guards.count == len(OURS)
    for x in allocated:
        write(x, x.numel())
    assert [found.tensor.data_ptr() for found in guards.overruns()] == [
        x.data_ptr() for x in allocated
    ]


def test_our_kernels_write_nothing_beside_their_tensors(device):
    assert forward_and_backward(device).overruns() == []


@pytest.mark.parametrize("name", OURS)
def test_a_tensor_one_row_too_short_for_our_kernels_is_overrun(name, device, monkeypatch):
    empty, made = allocation.empty, []

    def short(shape, **kwargs):
        if not math.prod(shape):
            return empty(shape, **kwargs)
        row = shape[-1] if len(shape) == 4 else 1
        made.append(empty([math.prod(shape) - row * (name == list(OURS)[len(made)])], **kwargs))
        # The guard band follows the end of the tensor.
        strides = torch.empty(shape, device="meta").stride()
        return made[-1].as_strided(shape, strides)

    monkeypatch.setattr(allocation, "empty", short)
    (found,) = forward_and_backward(device).overruns()
    assert found.tensor.data_ptr() == made[list(OURS).index(name)].data_ptr()
    # A byte of the first float32 element in the band may equal the guard's.
    assert (found.offset // 4, found.before) == (0, False)


def written_by_slices(x):
    made = torch.zeros_like(x)
    made[1:] = 2 * x[1:]
    made[:1] = x[:1]
    return made


def read_by_strides(x):
    return (1 * x).as_strided((2, 5), (5, 1), 5) * 3


@pytest.mark.parametrize("function", [written_by_slices, read_by_strides])
def test_gradients_of_slices_are_the_same_between_guard_bands(function, device):
    """Autograd allocates a tensor for them, and takes its offset in its storage to be 0."""
    x = normal(0, "x", SHAPE).float().to(device).requires_grad_()
    (want,) = torch.autograd.grad(function(x).sum(), x)
    with GuardBands():
        (got,) = torch.autograd.grad(function(x).sum(), x)
    assert got.equal(want)
