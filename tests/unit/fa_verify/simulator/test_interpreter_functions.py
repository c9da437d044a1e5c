"""Functions that call NumPy directly give the language's results bitwise."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fa_verify.simulator.interpreter import repair as repaired

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
semantic = pytest.importorskip("triton.language.semantic")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "the Triton interpreter is not in use: kernels run on the GPU", allow_module_level=True
    )

repaired.repair()

# The language's own functions.
OWN = semantic.TritonSemantic(interpreter.interpreter_builder)
SCALARS = (
    *("int1", "int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("fp16", "bf16", "fp32", "fp64", "fp8e5"),
)
TYPES = (
    *(tl.dtype(name) for name in SCALARS),
    tl.pointer_type(tl.float16),
    tl.pointer_type(tl.pointer_type(tl.int8)),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64)


@pytest.fixture
def language() -> Iterator[None]:
    """Patches the language as a launch does."""
    scope = interpreter._patch_lang(None)
    yield
    scope.restore()


def tensor(kind: Any, shape: tuple[int, ...], *, of_handle: Any = None) -> Any:
    """A tensor of distinct numbers, if the type has enough, that few types hold exactly."""
    data = (1.37 * np.arange(int(np.prod(shape)))).reshape(shape or (1,))
    data = data.astype(interpreter._get_np_dtype(of_handle or kind))
    handle = interpreter.TensorHandle(data, of_handle or kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Callable[..., Any], *args: Any, **named: Any) -> object:
    """A comparable form of the tensor that a function returns, or of its error."""
    try:
        x = function(*args, **named)
    except Exception as error:
        return type(error), str(error)
    data = x.handle.data
    return (
        *(type(x.type), str(x.type), [int(n) for n in x.shape], int(x.numel), str(x.dtype)),
        *(str(x.handle.dtype), x.handle.attr, data.dtype, data.shape, data.tobytes()),
    )


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_casts_are_those_of_the_language(kind):
    for target, shape in itertools.product(TYPES, ((), (4,), (2, 4))):
        x = tensor(kind, shape)
        wanted = outcome(OWN.cast, x, target)
        for cast in (tl.cast, tl.tensor.to, tl.cast, tl.tensor.to):
            assert outcome(cast, x, target) == wanted
    x = tensor(kind, (4,))
    assert x.to(kind) is x.to(kind) is x


@pytest.mark.usefixtures("language")
def test_casts_with_options_are_left_to_the_language():
    x = tensor(tl.float32, (4,))
    for _ in range(2):
        assert x.to(tl.float16).handle.data.tolist() != x.to(tl.int32).handle.data.tolist()
        wanted = outcome(OWN.cast, x, tl.float16, "rtz")
        assert outcome(x.to, tl.float16, fp_downcast_rounding="rtz") == wanted
        assert outcome(x.to, tl.float16, "rtz") == wanted
        wanted = outcome(OWN.bitcast, x, tl.int32)
        assert outcome(tl.cast, x, tl.int32, bitcast=True) == wanted
        assert outcome(tl.cast, input=x, dtype=tl.int32, bitcast=True) == wanted


@pytest.mark.usefixtures("language")
def test_a_handle_of_another_type_is_left_to_the_language():
    x, y = tensor(tl.int64, (4,)), tensor(tl.int64, (4,), of_handle=tl.int32)
    for _ in range(2):
        for each in (x, y):
            assert outcome(tl.cast, each, tl.float32) == outcome(OWN.cast, each, tl.float32)
            assert outcome(lambda x: x[:, None], each) == outcome(OWN.expand_dims, each, 1)


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", [tl.int32, tl.bfloat16, TYPES[-2], TYPES[-1]], ids=str)
def test_indices_are_those_of_the_language(kind):
    for shape in ((4,), (8,), (2, 4)):
        x = tensor(kind, shape)
        for _ in range(2):
            assert outcome(lambda x: x[None, :], x) == outcome(OWN.expand_dims, x, 0)
            assert outcome(lambda x: x[:, None], x) == outcome(OWN.expand_dims, x, 1)
            assert outcome(lambda x: x[None], x) == outcome(OWN.expand_dims, x, 0)
    x, y = tensor(kind, ()), tensor(kind, (4,))
    for _ in range(2):
        for wrong in ((slice(1), None), (None, slice(2)), (slice(None), 0), (slice(None),) * 2):
            assert outcome(lambda x, at: x[at], y, wrong)[0] is ValueError
        assert outcome(lambda x: x[:, None], x)[0] is ValueError


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_full_blocks_are_those_of_the_language(kind):
    for shape, value in itertools.product(
        ([], [1], [4], [2, 4], (4,)),
        (0, 0.0, -0.0, 2, 1.5, -1, float("-inf"), True),
    ):
        wanted = outcome(OWN.full, shape, value, kind)
        for dtype in (kind, tl.constexpr(kind), kind):
            for full in (tl.full, tl.core.full):
                assert outcome(full, shape, value, dtype) == wanted
                assert outcome(full, [*map(tl.constexpr, shape)], value, dtype) == wanted
                assert outcome(full, shape, tl.constexpr(value), dtype) == wanted
    for wrong in ([3], 4, [4.0]):
        assert {outcome(tl.full, wrong, 0, kind)[0] for _ in range(2)} <= {TypeError, ValueError}


@pytest.mark.usefixtures("language")
def test_a_write_to_a_block_that_is_kept_raises():
    tl.full([4], 0, tl.float32)
    with pytest.raises(ValueError, match="read-only"):
        tl.full([4], 0, tl.float32).handle.data[0] = 1


@pytest.mark.usefixtures("language")
def test_ranges_are_those_of_the_language():
    for start, end in ((0, 4), (4, 8), (0, 8), (0, 4), (4, 8), (0, 3), (4, 4), (0.0, 4.0)):
        wanted = outcome(OWN.arange, start, end)
        assert outcome(tl.arange, start, end) == wanted
        assert outcome(tl.arange, tl.constexpr(start), end) == wanted
    with pytest.raises(ValueError, match="read-only"):
        tl.arange(0, 4).handle.data[0] = 1


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", [tl.int32, tl.bfloat16, tl.int1, TYPES[-2]], ids=str)
def test_shapes_and_halves_are_those_of_the_language(kind):
    for shape in ((4,), (2, 4), (2, 2, 2), (4, 2)):
        x = tensor(kind, shape)
        for new in ((4, 2), [2, 4], (8,), [tl.constexpr(4), 2], (16,)):
            plain = [int(getattr(size, "value", size)) for size in new]
            wanted = outcome(OWN.reshape, x, plain, False)
            for _ in range(2):
                assert outcome(tl.reshape, x, new) == wanted
                assert outcome(tl.reshape, x, *new) == wanted
        for _ in range(2):
            if shape[-1] == 2:
                wanted = [outcome(OWN.split(x).__getitem__, i) for i in (0, 1)]
                assert [outcome(tl.split(x).__getitem__, i) for i in (0, 1)] == wanted
            else:
                assert outcome(tl.split, x)[0] is AssertionError
    pair = tensor(tl.int32, (2,))
    for _ in range(2):
        assert [(int(x), x.handle.data.shape) for x in tl.split(pair)] == [(0, (1,)), (1, (1,))]


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_choices_are_those_of_the_language(kind):
    numbers = (0, 1, -3, True, 0.0, -0.0, 2.5, float("nan"))
    for m, n, of in itertools.product(((), (4,), (2, 4)), ((), (1, 4), (2, 4)), TYPES):
        x, y = tensor(kind, m), tensor(of, n)
        condition = tensor(tl.int1, (2, 4))
        for operands in ((x, y), (y, x), *((x, number) for number in numbers)):
            wanted = outcome(OWN.where, condition, *operands)
            assert [outcome(tl.where, condition, *operands) for _ in range(2)] == [wanted] * 2


@pytest.mark.usefixtures("language")
@pytest.mark.filterwarnings("ignore:tl.where with a non-boolean condition")
def test_a_condition_is_a_truth_value():
    zero = tensor(tl.bfloat16, (4,))
    zero.handle.data[...] = 0x8000
    x = tensor(tl.int32, (4,))
    for _ in range(2):
        assert not tl.where(zero, x, 0).handle.data.any()


@pytest.mark.usefixtures("language")
def test_choices_have_the_layout_of_the_language():
    x = tensor(tl.float32, (2, 4)).T
    condition = tensor(tl.int1, (2, 4)).T
    for y in (0.0, -0.0, 1.0, tensor(tl.float32, ()), x):
        wanted = OWN.where(condition, x, OWN.to_tensor(y)).handle.data
        for _ in range(3):
            found = tl.where(condition, x, y).handle.data
            assert (found.strides, found.tobytes()) == (wanted.strides, wanted.tobytes())


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_extremes_are_those_of_the_language(kind):
    every, none = tl.PropagateNan.ALL, tl.PropagateNan.NONE
    for shape, other in itertools.product(((), (4,), (2, 4)), (0, 2, 2.5, float("nan"), *TYPES)):
        x = tensor(kind, shape)
        y = other if isinstance(other, int | float) else tensor(other, (2, 4))
        for name, nan in itertools.product(("maximum", "minimum"), (every, none)):
            wanted = outcome(getattr(OWN, name), x, y, nan)
            options = {} if nan is none else {"propagate_nan": nan}
            found = [outcome(getattr(tl, name), x, y, **options) for _ in range(2)]
            assert found == [wanted] * 2
            assert outcome(getattr(tl, name), x, y, nan) == wanted


@pytest.mark.usefixtures("language")
def test_nan_is_no_extreme():
    x = tensor(tl.float32, (4,))
    x.handle.data[2] = np.nan
    for _ in range(2):
        assert tl.maximum(x, 2.5).handle.data.tolist()[2] == 2.5
        assert tl.minimum(x, 2.5).handle.data.tolist()[2] == 2.5


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize(
    "kind", [tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.int8], ids=str
)
def test_products_are_those_of_the_language(kind):
    a, b = tensor(kind, (2, 4)), tensor(kind, (4, 8))
    result = tl.int32 if kind.is_int() else tl.float64 if kind.is_fp64() else tl.float32
    acc = tensor(result, (2, 8))
    for precision, start in itertools.product(("ieee", "tf32"), (None, acc)):
        wanted = outcome(OWN.dot, a, b, start, precision, None, result)
        for _ in range(3):
            named = {"input_precision": precision, "out_dtype": result}
            assert outcome(tl.dot, a, b, start, **named) == wanted
            assert outcome(tl.dot, a, b, acc=start, **named) == wanted
    assert outcome(tl.dot, a, a, input_precision="ieee")[0] is AssertionError
    both = {"input_precision": "ieee", "allow_tf32": False, "out_dtype": result}
    assert outcome(tl.dot, a, b, **both)[0] is AssertionError
    wanted = outcome(OWN.dot, a, b, None, "tf32", None, result)
    assert outcome(tl.dot, a, b, None, allow_tf32=True, out_dtype=result) == wanted


@pytest.mark.usefixtures("language")
def test_products_of_more_axes_are_those_of_each_pair_of_matrices():
    a, b = tensor(tl.float32, (2, 1, 2, 4)), tensor(tl.float32, (2, 1, 4, 8))
    for _ in range(3):
        found = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)
        assert found.handle.data.shape == (2, 1, 2, 8)
        assert np.array_equal(found.handle.data, a.handle.data @ b.handle.data)


@pytest.mark.usefixtures("language")
def test_arguments_of_launches_have_the_types_of_the_language():
    wanted = (
        (1, "i32"),
        (True, "u1"),
        (0, "i32"),
        (False, "u1"),
        (-(2**40), "i64"),
    )
    for argument, kind in (*wanted, *wanted):
        made = interpreter._implicit_cvt(argument)
        assert (made.handle.data.tolist(), made.dtype.mangle()) == ([argument], kind)


@triton.jit
def copy_twice(
    x_ptr, y_ptr, z_ptr, M, N, OTHER: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr
):
    """Copies x (BLOCK, BLOCK) to y; to z by the language's own functions."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    places = rows * BLOCK + columns
    for _ in range(2):
        if MASK == "both":
            mask = (rows < M) & (columns < N)
            x = tl.load(x_ptr + places, mask=mask, other=OTHER)
            z = tl.load(x_ptr + places, mask=mask, other=OTHER, volatile=True)
        elif MASK == "rows":
            mask = rows < M
            x = tl.load(x_ptr + places, mask, OTHER)
            z = tl.load(x_ptr + places, mask, OTHER, volatile=True)
        elif MASK == "pointers":
            # A row of pointers, and a mask of a block.
            mask = (rows < M) & (columns < N)
            x = tl.load(x_ptr + columns, mask=mask, other=OTHER)
            z = tl.load(x_ptr + columns, mask=mask, other=OTHER, volatile=True)
        elif MASK == "poison":
            mask = (rows < M) & (columns < N)
            x = tl.load(x_ptr + places, mask=mask)
            z = tl.load(x_ptr + places, mask=mask, volatile=True)
        else:
            mask = rows < BLOCK
            x = tl.load(x_ptr + places)
            z = tl.load(x_ptr + places, volatile=True)
        tl.store(y_ptr + places, x, cache_modifier="")
        tl.store(z_ptr + places, z)
        tl.store(y_ptr + BLOCK * BLOCK + places, x, mask=mask)
        tl.store(z_ptr + BLOCK * BLOCK + places, z, mask=mask, cache_modifier="")


@triton.jit
def copy_scalar(x_ptr, y_ptr, at, end, OTHER: tl.constexpr):
    for _ in range(2):
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < end, other=OTHER))
        tl.store(y_ptr + at + 1, tl.load(x_ptr + at + 1), mask=at + 1 < end)


@triton.jit
def copy_cast(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Stores values of another type than the elements', and a number."""
    places = tl.arange(0, BLOCK)
    for _ in range(2):
        tl.store(y_ptr + places, tl.load(x_ptr + places).to(tl.float32) + 0.75)
        tl.store(y_ptr + BLOCK, 7)


@triton.jit
def spread(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Stores a row as each row of two blocks."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    row = tl.load(x_ptr + columns)
    for i in range(2):
        tl.store(y_ptr + i * BLOCK * BLOCK + rows * BLOCK + columns, row)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


@pytest.mark.parametrize("mask", ["both", "rows", "pointers", "poison", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loads_and_stores_are_those_of_the_language(dtype, mask):
    x = torch.arange(-10, 54).to(dtype)
    for (M, N), other in itertools.product(((5, 7), (8, 8), (0, 3)), (0.0, -0.0, 0, 1, 1.0, -2.5)):
        y, z = (torch.full((128,), 9).to(dtype) for _ in range(2))
        copy_twice[(1,)](x, y, z, M, N, other, 8, mask)
        assert bits(y) == bits(z)
        wanted = x.reshape(8, 8)
        if mask in ("both", "rows", "none"):
            rows, columns = {"both": (M, N), "rows": (M, 8), "none": (8, 8)}[mask]
            wanted = torch.full((8, 8), other).to(dtype)
            wanted[:rows, :columns] = x.reshape(8, 8)[:rows, :columns]
            assert bits(y[:64]) == bits(wanted.flatten())
            assert (y[64:].reshape(8, 8)[rows:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_are_loaded_and_stored(dtype):
    x = torch.arange(1, 9).to(dtype)
    for at, wanted in ((2, [3, 4]), (4, [5, 0]), (5, [4, 0])):
        y = torch.zeros(8, dtype=dtype)
        copy_scalar[(1,)](x, y, at, 5, 4)
        assert y[at : at + 2].tolist() == wanted
        y[at : at + 2] = 0
        assert not y.any()


def test_a_row_is_stored_as_each_row_of_a_block():
    x, y = torch.arange(4), torch.zeros(32, dtype=torch.int64)
    spread[(1,)](x, y, 4)
    assert y.reshape(8, 4).tolist() == [[0, 1, 2, 3]] * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_another_type_are_cast_by_a_store(dtype):
    x, y = torch.arange(8).to(dtype), torch.zeros(9, dtype=dtype)
    copy_cast[(1,)](x, y, 8)
    assert torch.equal(y, torch.cat([(x.float() + 0.75).to(dtype), torch.tensor([7]).to(dtype)]))


@triton.jit
def differ_in_truth(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    for _ in range(2):
        tl.store(z_ptr + places, tl.load(x_ptr + places) ^ tl.load(y_ptr + places))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_byte_but_zero_is_true(number):
    x, y = torch.full((8,), number, dtype=torch.int8), torch.tensor([0, 1] * 4).bool()
    z = torch.full((8,), 5, dtype=torch.int8)
    differ_in_truth[(1,)](x.view(torch.bool), y, z.view(torch.bool), 8)
    assert z.tolist() == [int(bool(number) != bool(each)) for each in [0, 1] * 4]
