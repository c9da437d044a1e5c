"""The repaired interpreter computes as a GPU does: casts, bf16, dots, undefined lanes."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
import torch

from fa_verify.oracles.stream import integers
from fa_verify.simulator.interpreter import launches
from fa_verify.simulator.interpreter import repair as repaired
from fa_verify.simulator.interpreter.dot_order import dots_in_order

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED:
    pytest.skip(
        "the Triton interpreter is not in use: kernels run on the GPU", allow_module_level=True
    )


def language() -> list[dict[str, object]]:
    """The current contents of every namespace that a launch patches."""
    core = tl.core
    classes = (core.tensor, core.block_type, core.dtype, core.condition)
    spaces = (tl, core, tl.math, core.tensor_descriptor_base, *classes)
    # Python creates an empty __annotations__ of a class when it is read.
    return [{k: v for k, v in vars(x).items() if k != "__annotations__"} for x in spaces]


LANGUAGE = language()
if INTERPRETED:
    repaired.repair()

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BITS = {FP16: torch.int16, BF16: torch.int16, FP32: torch.int32, FP64: torch.int64}
SEEN: list[object] = []


@triton.jit
def cast_kernel(X, Y, N: tl.constexpr, ROUNDING: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(X + offs)
    tl.store(Y + offs, x.to(Y.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def descriptor_kernel(X, Y, N, D: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(X, [N, D], [D, 1], [BLOCK, D])
    y = tl.make_tensor_descriptor(Y, [N, D], [D, 1], [BLOCK, D])
    for start in range(0, N, BLOCK):
        y.store([start, 0], x.load([start, 0]))


@triton.jit
def fill_kernel(Y, VALUE: tl.constexpr):
    tl.store(Y + tl.arange(0, 16), tl.full((16,), VALUE, Y.dtype.element_ty))


@triton.jit
def elementwise_kernel(A, B, Y, N: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, N)
    a = tl.load(A + offs)
    b = tl.load(B + offs)
    if OP == "add":
        y = a + b
    elif OP == "sub":
        y = a - b
    elif OP == "mul":
        y = a * b
    elif OP == "neg":
        y = -a
    elif OP == "abs":
        y = tl.abs(a)
    elif OP == "max":
        y = tl.maximum(a, b)
    elif OP == "clamp":
        y = tl.clamp(a, -tl.abs(b), tl.abs(b))
    elif OP == "clamp_nan":
        y = tl.clamp(a, -tl.abs(b), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
    elif OP == "where":
        y = tl.where(a < b, a, b)
    elif OP == "less":
        y = (a < b).to(tl.bfloat16)
    elif OP == "scalar":
        y = a * 3.0
    tl.store(Y + offs, y)


@triton.jit
def fma_kernel(A, B, C, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(Y + offs, tl.fma(tl.load(A + offs), tl.load(B + offs), tl.load(C + offs)))


@triton.jit
def reduce_kernel(X, Y, INDEX, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr):
    x = tl.load(X + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "cumsum":
        offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(Y + offs, tl.cumsum(x, 1))
    elif OP == "sum":
        tl.store(Y + tl.arange(0, M), tl.sum(x, 1))
    elif OP == "sum_all":
        tl.store(Y, tl.sum(x))
    elif OP == "argmax":
        y, i = tl.max(x, 1, return_indices=True)
        tl.store(Y + tl.arange(0, M), y)
        tl.store(INDEX + tl.arange(0, M), i)


@triton.jit
def dot_kernel(A, B, Y, S: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    offs = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    acc = tl.full((S, S), 1.0, ACC)
    y = tl.dot(tl.load(A + offs), tl.load(B + offs), acc, PRECISION, out_dtype=ACC)
    tl.store(Y + offs, y)


@triton.jit
def masked_load_kernel(X, Y, live, OTHER: tl.constexpr):
    offs = tl.arange(0, 16)
    if OTHER is None:
        x = tl.load(X + offs, mask=offs < live)
    else:
        x = tl.load(X + offs, mask=offs < live, other=OTHER)
    tl.store(Y + offs, x)


@triton.jit
def masked_scalar_load_kernel(X, Y):
    tl.store(Y, tl.load(X, mask=tl.program_id(0) > 0, other=0.0))


@triton.jit
def masked_atomic_load_kernel(X, Y):
    zero = tl.load(X, mask=tl.program_id(0) > 0, other=0.0)
    lanes = tl.arange(0, 16)
    tl.store(Y + lanes, zero + tl.atomic_load(X + lanes, mask=lanes < 5))


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def nested(x):
    return tl.sum(twice(x), 0)


@triton.jit
def nested_calls_kernel(Y, fail: tl.constexpr):
    SEEN.append(tl.static_range)
    x = nested(tl.zeros((16,), tl.float32))
    SEEN.append(tl.static_range)
    tl.store(Y, x + tl.max(tl.arange(0, 16), 0))
    tl.static_assert(not fail)


@triton.jit
def half_tile_kernel(Y, S: tl.constexpr):
    tl.store(Y + tl.arange(0, 8), tl.zeros((8,), tl.float32))
    tl.block_type(tl.float32, [S / 2])


@triton.jit
def atomic_add_kernel(X, INDICES, Y, BEFORE, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < N
    indices = tl.load(INDICES + offs, mask=inside, other=0)
    before = tl.atomic_add(Y + indices, tl.load(X + offs, mask=inside, other=0.0), mask=inside)
    tl.store(BEFORE + offs, before, mask=inside)


@triton.jit
def lacking_kernel(X, HOW: tl.constexpr):
    x = tl.load(X + tl.arange(0, 16))
    if HOW == "asm":
        tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    elif HOW == "builder":
        tl.extra.cuda.num_warps()
    elif HOW == "language":
        tl.dot(x, x)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of floats, with all NaN equal."""
    patterns = x.view(BITS[x.dtype])
    return torch.where(x.isnan(), torch.full_like(patterns, -1), patterns)


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    size = triton.next_power_of_2(len(x))
    padded = torch.zeros(size, dtype=x.dtype)
    padded[: len(x)] = x
    y = torch.empty(size, dtype=dtype)
    cast_kernel[(1,)](padded, y, N=size, ROUNDING=rounding)
    return y[: len(x)]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type, in the order of their bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).roll(2**15).view(dtype)


def magnitudes(dtype: torch.dtype) -> np.ndarray:
    """The finite magnitudes of a 16-bit type and the next one, indexed by bits."""
    values = all_values(dtype)[: 2**15].double()
    values = values[values.isfinite()]
    return torch.cat([values, 2 * values[-1:] - values[-2:-1]]).numpy()


def hard_values(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Every value of ``target``, every tie, their neighbours in ``source``, and random bits."""
    grid = magnitudes(target)
    values = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2])
    with np.errstate(over="ignore"):  # Inf follows the largest float32
        near = torch.from_numpy(values).to(source).numpy()
        near = np.concatenate([np.nextafter(near, -np.inf), near, np.nextafter(near, np.inf)])
    width = torch.finfo(source).bits
    random = (integers(1, "bits", (2**14,)) >> (64 - width)).to(BITS[source]).view(source)
    special = torch.tensor([torch.inf, torch.nan, 0.0], dtype=source)
    some = torch.cat([torch.from_numpy(near), random, special])
    return torch.cat([some, -some])


def rounded_by_table(x: torch.Tensor, target: torch.dtype, rounding: str) -> torch.Tensor:
    """Rounds once and exactly to a 16-bit type by a search in the table of its values."""
    grid = magnitudes(target)
    size = x.double().abs().numpy()
    if rounding == "rtz":
        index = np.minimum(np.searchsorted(grid, size, side="right") - 1, len(grid) - 2)
        index[np.isinf(size)] = len(grid) - 1
    else:
        ties = (grid[:-1] + grid[1:]) / 2
        index = np.searchsorted(ties, size, side="left")
        tied = (index < len(ties)) & (ties[np.minimum(index, len(ties) - 1)] == size)
        index += tied & (index % 2 == 1)
    y = torch.from_numpy(index).to(torch.int16).view(target)
    y = torch.where(x.isnan(), torch.full_like(y, torch.nan), y)
    return torch.where(torch.signbit(x), -y, y)


def bf16_noise(name: str, size: int) -> torch.Tensor:
    """Finite bf16 of either sign and of magnitudes 2**-32 to 2**32."""
    random = integers(7, name, (size,))
    exponents = (95 + ((random >> 16) & 63)) << 7
    pattern = (random & 0x807F) | exponents
    return torch.where(pattern >= 2**15, pattern - 2**16, pattern).to(torch.int16).view(BF16)


@pytest.mark.parametrize("target", [FP32, FP64])
@pytest.mark.parametrize("source", [FP16, BF16])
def test_16_bit_floats_widen_exactly(source, target):
    values = all_values(source)
    assert torch.equal(bits(cast(values, target)), bits(values.to(target)))


@pytest.mark.parametrize(("source", "target"), [(FP16, BF16), (BF16, FP16)])
def test_casts_between_16_bit_floats_equal_torch(source, target):
    values = all_values(source)
    assert torch.equal(bits(cast(values, target)), bits(values.to(target)))


@pytest.mark.parametrize("target", [FP16, BF16])
def test_fp32_rounds_to_16_bits_as_torch_does(target):
    values = hard_values(FP32, target)
    assert torch.equal(bits(cast(values, target)), bits(values.to(target)))


@pytest.mark.parametrize("rounding", ["rtne", "rtz"])
@pytest.mark.parametrize("target", [FP16, BF16])
@pytest.mark.parametrize("source", [FP32, FP64])
def test_narrowing_rounds_once_in_the_mode_asked_for(source, target, rounding):
    values = hard_values(source, target)
    expected = rounded_by_table(values, target, rounding)
    assert torch.equal(bits(cast(values, target, rounding)), bits(expected))


def test_fp64_rounds_to_fp32_as_torch_does():
    values = torch.cat([hard_values(FP32, BF16).double(), hard_values(FP64, BF16)])
    assert torch.equal(bits(cast(values, FP32)), bits(values.to(FP32)))


def test_fp64_truncates_to_fp32_toward_zero():
    values = integers(2, "bits", (2**14,)).view(FP64)
    nearest = values.to(FP32)
    beyond = nearest.double().abs() > values.abs()
    expected = torch.where(beyond, torch.nextafter(nearest, torch.zeros(())), nearest)
    assert torch.equal(bits(cast(values, FP32, "rtz")), bits(expected))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_round_once_to_bf16(dtype):
    width = torch.iinfo(dtype).bits
    # int64 stays below 2**53, so that the expected value starts from an exact float64.
    values = (integers(3, "ints", (2**12,)) >> (64 - min(width, 53))).to(dtype)
    expected = rounded_by_table(values.double(), BF16, "rtne")
    assert torch.equal(bits(cast(values, BF16)), bits(expected))


def test_bf16_truncates_to_the_integer_below_in_magnitude():
    values = all_values(BF16)
    values = values[values.abs() < 2**31]
    assert torch.equal(cast(values, torch.int32), values.to(torch.int32))


def test_bf16_constants_round_once():
    y = torch.empty(16, dtype=BF16)
    fill_kernel[(1,)](y, VALUE=1 + 2**-8 + 2**-40)
    assert y.tolist() == [1 + 2**-7] * 16


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("neg", lambda a, b: -a),
        ("abs", lambda a, b: a.abs()),
        ("max", torch.maximum),
        ("clamp", lambda a, b: a.clamp(-b.abs(), b.abs())),
        ("clamp_nan", lambda a, b: a.clamp(-b.abs(), b.abs())),
        ("where", torch.minimum),
        ("less", lambda a, b: (a < b).to(BF16)),
        ("scalar", lambda a, b: a * 3.0),
    ],
)
def test_bf16_arithmetic_equals_torch(op, expected):
    a, b = bf16_noise("a", 4096), bf16_noise("b", 4096)
    y = torch.empty_like(a)
    elementwise_kernel[(1,)](a, b, y, N=4096, OP=op)
    assert torch.equal(bits(y), bits(expected(a, b)))


def test_bf16_fma_rounds_once():
    a, b, c = (integers(8, name, (4096,)) % 128 for name in "abc")
    y = torch.empty(4096, dtype=BF16)
    fma_kernel[(1,)](a.to(BF16), b.to(BF16), c.to(BF16), y, N=4096)
    assert torch.equal(bits(y), bits(rounded_by_table((a * b + c).double(), BF16, "rtne")))


def test_bf16_fma_sees_an_addend_that_float64_drops():
    # 259 and 261 are ties: alone they round to 260, and the tiny addend pushes them off it.
    a, b, c = (torch.tensor(x, dtype=BF16) for x in ([7, 9], [37, 29], [-(2.0**-100), 2.0**-100]))
    y = torch.empty(2, dtype=BF16)
    fma_kernel[(1,)](a, b, c, y, N=2)
    assert y.tolist() == [258, 262]


@pytest.mark.parametrize("op", ["sum", "sum_all"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_16_bit_sums_round_after_every_addition(dtype, op):
    x = torch.from_numpy(np.linspace(0.1, 30, 4 * 64)).to(dtype).view(4, 64)
    tree = x if op == "sum" else x.view(1, -1)
    while tree.shape[1] > 1:
        tree = torch.add(*tree.chunk(2, dim=1))
    y = torch.empty(len(tree), dtype=dtype)
    reduce_kernel[(1,)](x, y, y, M=4, N=64, OP=op)
    assert torch.equal(y, tree[:, 0])
    assert not torch.equal(y.double(), x.double().view(len(tree), -1).sum(1))


def test_bf16_maximum_and_its_index_equal_torch():
    x = -bf16_noise("x", 4 * 64).abs().view(4, 64)
    y, i = torch.empty(4, dtype=BF16), torch.empty(4, dtype=torch.int32)
    reduce_kernel[(1,)](x, y, i, M=4, N=64, OP="argmax")
    expected = x.max(dim=1)
    assert torch.equal(y, expected.values)
    assert torch.equal(i.long(), expected.indices)


def test_bf16_cumulative_sum_rounds_at_every_step():
    x = bf16_noise("x", 4 * 16).view(4, 16)
    expected = x.clone()
    for n in range(1, 16):
        expected[:, n] += expected[:, n - 1]
    y = torch.empty_like(x)
    reduce_kernel[(1,)](x, y, y, M=4, N=16, OP="cumsum")
    assert torch.equal(y, expected)


def dot(a, b, acc, precision=None):
    y = torch.empty(a.shape, dtype={tl.float32: FP32, tl.float64: FP64}[acc])
    dot_kernel[(1,)](a, b, y, S=16, ACC=acc, PRECISION=precision)
    return y


@pytest.mark.parametrize(("dtype", "largest"), [(BF16, 255), (FP16, 1000)])
def test_16_bit_dots_have_exact_products_and_fp32_sums(dtype, largest):
    # Products and sums of integers below 2**24 are exact in any order.
    a, b = (integers(4, name, (16, 16)) % (largest + 1) for name in "ab")
    y = dot(a.to(dtype), b.to(dtype), tl.float32)
    assert torch.equal(y.long(), a @ b + 1)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_fp32_dots_truncate_their_operands_in_tf32_only(side, precision):
    # With the identity matrix every sum has one term, so the result shows the operand.
    x = (integers(5, "x", (16, 16)) & 0x7FFFFF).double() * 2.0**-23 * 64 + 64
    x, one = x.to(FP32), torch.eye(16)
    y = dot(x, one, tl.float32, precision) if side == "left" else dot(one, x, tl.float32, precision)
    read = (x.view(torch.int32) & ~0x1FFF).view(FP32) if precision in ("tf32", None) else x
    assert torch.equal(y, read + 1)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_dots_in_order_give_a_row_the_same_bits_in_any_place(dtype):
    a, b = (integers(7, name, (16, 16)).double() * 2.0**-63 for name in "ab")
    a, b = a.to(dtype), b.to(dtype)
    acc = tl.float64 if dtype == FP64 else tl.float32
    with dots_in_order():
        rows = [dot(a.roll(i, 0), b, acc, "ieee").roll(-i, 0) for i in range(16)]
    assert all(torch.equal(rows[0], one) for one in rows)
    wide = FP64 if dtype == FP64 else FP32
    want = sum(a[:, k, None].to(wide) * b[k].to(wide) for k in range(16)) + 1
    assert torch.equal(rows[0], want)


def test_fp64_dots_stay_in_float64():
    x = integers(6, "x", (16, 16)).double() * 2.0**-63
    assert torch.equal(dot(x, torch.eye(16, dtype=FP64), tl.float64), x + 1)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_masked_off_lanes_without_other_are_nan(dtype):
    y = torch.empty(16, dtype=dtype)
    masked_load_kernel[(1,)](torch.ones(16, dtype=dtype), y, 5, OTHER=None)
    assert y[:5].tolist() == [1.0] * 5
    assert y[5:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_masked_off_integers_without_other_are_wild(dtype):
    y = torch.empty(16, dtype=dtype)
    masked_load_kernel[(1,)](torch.ones(16, dtype=dtype), y, 5, OTHER=None)
    wild = int.from_bytes(b"\x5a" * y.itemsize)
    assert y.tolist() == [1] * 5 + [wild] * 11


def test_masked_off_bools_without_other_are_true():
    y = torch.zeros(16, dtype=torch.bool)
    masked_load_kernel[(1,)](torch.zeros(16, dtype=torch.bool), y, 5, OTHER=None)
    assert y.tolist() == [False] * 5 + [True] * 11


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.int32])
@pytest.mark.parametrize("other", [0, 7])
def test_masked_off_lanes_hold_other_where_it_is_given(dtype, other):
    y = torch.empty(16, dtype=dtype)
    masked_load_kernel[(1,)](torch.ones(16, dtype=dtype), y, 5, OTHER=other)
    assert y.tolist() == [1] * 5 + [other] * 11


def test_a_masked_off_scalar_load_holds_its_zero_other():
    y = torch.ones(1)
    masked_scalar_load_kernel[(1,)](torch.ones(1), y)
    assert y.tolist() == [0.0]


def test_masked_off_atomic_loads_are_nan_after_a_load_with_other():
    y = torch.empty(16)
    masked_atomic_load_kernel[(1,)](torch.ones(16), y)
    assert y[:5].tolist() == [1.0] * 5
    assert y[5:].isnan().all()


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_tensor_descriptors_load_and_store_the_rows_of_their_tensor(dtype):
    x = torch.arange(5 * 16, dtype=dtype).view(5, 16)
    y = torch.zeros_like(x)
    descriptor_kernel[(1,)](x, y, 5, D=16, BLOCK=4)
    assert torch.equal(y, x)


@pytest.mark.parametrize("fail", [False, True])
def test_a_launch_leaves_the_language_as_it_was(fail):
    y = torch.zeros(1)
    if fail:
        with pytest.raises(triton.runtime.errors.InterpreterError):
            nested_calls_kernel[(1,)](y, fail=True)
    else:
        nested_calls_kernel[(1,)](y, fail=False)
    assert y.item() == 15
    assert language() == LANGUAGE


def test_a_jit_function_called_outside_a_launch_leaves_the_language_as_it_was():
    assert twice(3) == 6
    assert language() == LANGUAGE


def test_nested_calls_do_not_patch_the_language_again():
    SEEN.clear()
    nested_calls_kernel[(2,)](torch.zeros(1), fail=False)
    assert len(SEEN) == 4
    assert len(set(SEEN)) == 1


def test_a_shape_that_is_no_int_is_still_refused():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="Shape element 0"):
        half_tile_kernel[(1,)](torch.zeros(8), S=16)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_atomic_additions_round_each_in_turn(dtype):
    count = 27
    x = (integers(3, "atomics", (count,)).double() / 2**60).to(dtype)
    indices = torch.arange(count, dtype=torch.int32) * 7 % 5
    y, before = torch.ones(6, dtype=dtype), torch.zeros(count, dtype=dtype)
    atomic_add_kernel[(1,)](x, indices, y, before, count, BLOCK=32)
    want, seen = torch.ones(6, dtype=dtype), []
    for place, addend in zip(indices.tolist(), x, strict=True):
        seen.append(want[place].clone())
        want[place] += addend
    assert torch.equal(y, want)
    assert torch.equal(before, torch.stack(seen))


def test_an_atomic_addition_of_bf16_out_of_bounds_is_an_error():
    x, y = torch.ones(4, dtype=BF16), torch.zeros(3, dtype=BF16)
    indices = torch.arange(4, dtype=torch.int32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="updates 1 of 4 elements"):
        atomic_add_kernel[(1,)](x, indices, y, torch.zeros_like(x), 4, BLOCK=4)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("asm", "^cannot run on a CPU: inline_asm not supported"),
        ("builder", "^cannot run on a CPU: Triton's interpreter has no num_warps$"),
    ],
)
def test_what_the_interpreter_lacks_cannot_run_on_a_cpu(how, message):
    with pytest.raises(NotImplementedError, match=message):
        lacking_kernel[(1,)](torch.zeros(16), HOW=how)


def test_what_the_language_refuses_is_the_kernels_fault():
    with pytest.raises(triton.runtime.errors.InterpreterError):
        lacking_kernel[(1,)](torch.zeros(16), HOW="language")


def test_a_second_repair_changes_nothing():
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    before = dict(vars(InterpreterBuilder)), dict(vars(InterpretedFunction))
    repaired.repair()
    assert (dict(vars(InterpreterBuilder)), dict(vars(InterpretedFunction))) == before


@pytest.mark.parametrize(("value", "message"), [(None, "is not set"), ("0", "is '0'")])
def test_repair_names_what_it_found_where_the_interpreter_is_off(monkeypatch, value, message):
    monkeypatch.setattr(repaired, "_repaired", False)
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with pytest.raises(RuntimeError, match=message):
        repaired.repair()


def test_repair_names_what_the_installed_triton_lacks(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    before = vars(InterpreterBuilder)["cast_impl"]
    monkeypatch.setattr(repaired, "_repaired", False)
    monkeypatch.delattr(InterpreterBuilder, "create_dot")
    with pytest.raises(RuntimeError, match=r"no triton.runtime.interpreter.*create_dot"):
        repaired.repair()
    assert vars(InterpreterBuilder)["cast_impl"] is before


def test_the_header_line_says_whether_the_repair_is_on(monkeypatch):
    assert "interpreter repaired" in repaired.describe()
    monkeypatch.setattr(repaired, "_repaired", False)
    assert "not repaired" in repaired.describe()


def test_no_call_below_a_launch_maps_memory_for_its_frame():
    def faults(depth):
        """Page faults of many calls at a stack depth of ``depth`` more frames."""
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(CALLS):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # At one of these depths a call crosses the end of a chunk of frames.
    assert max(launches.with_room(faults)(depth) for depth in range(300)) < CALLS


CALLS = 200


def leaf():
    """A call that only adds a frame."""
