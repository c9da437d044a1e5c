"""Operators that call NumPy directly give the language's results bitwise, and in its layout."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fa_verify.simulator.interpreter import repair as repaired

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
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: OWN.add(x, y, True),
    "sub": lambda x, y: OWN.sub(x, y, True),
    "mul": lambda x, y: OWN.mul(x, y, True),
    "truediv": OWN.truediv,
    "floordiv": OWN.floordiv,
    "mod": OWN.mod,
    "lt": OWN.less_than,
    "le": OWN.less_equal,
    "gt": OWN.greater_than,
    "ge": OWN.greater_equal,
    "eq": OWN.equal,
    "ne": OWN.not_equal,
    "and": OWN.and_,
    "or": OWN.or_,
    "xor": OWN.xor_,
}
SCALARS = (
    *("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("fp16", "bf16", "fp32", "fp64", "fp8e5"),
)
TYPES = (
    *(tl.dtype(name) for name in SCALARS),
    tl.pointer_type(tl.int1),
    tl.pointer_type(tl.float16),
    tl.pointer_type(tl.float64, 3),
    tl.pointer_type(tl.pointer_type(tl.int8)),
)
PAIRS = (
    *(((), ()), ((), (4,)), ((2, 4), ()), ((4,), (4,)), ((2, 1), (1, 4)), ((4,), (2, 4))),
    ((4,), (8,)),
)
NUMBERS = (0, 1, -3, True, 0.0, -0.0, 1.0, 2.5, float("inf"), float("nan"), 300, 2**31, -(2**40))


@pytest.fixture(autouse=True)
def language() -> Iterator[None]:
    """Patches the language as a launch does."""
    scope = interpreter._patch_lang(None)
    yield
    scope.restore()


def tensor(kind: Any, shape: tuple[int, ...], start: int = 0, *, transposed: bool = False) -> Any:
    """A tensor of distinct numbers, if the type has enough, that few types hold exactly."""
    sizes = shape[::-1] if transposed else shape
    data = 1.37 * np.arange(start, start + int(np.prod(shape))).reshape(sizes or (1,))
    data = data.astype(interpreter._get_np_dtype(kind))
    return made(data.T if transposed else data, kind, kind, shape)


def made(data: Any, of_handle: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    """A tensor whose handle names a type."""
    handle = interpreter.TensorHandle(data, of_handle)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Callable[..., Any], *args: Any) -> object:
    """A comparable form of the tensor that a function returns, or of its error."""
    try:
        x = function(*args)
    except Exception as error:
        return type(error), str(error)
    data = x.handle.data
    # A load does not depend on the layout of its pointers.
    layout = None if x.dtype.is_ptr() else data.strides
    return (
        *(type(x.type), str(x.type), getattr(x.dtype, "address_space", None), str(x.dtype)),
        *([int(n) for n in x.shape], int(x.numel), str(x.handle.dtype), x.handle.attr),
        *(data.dtype, data.shape, layout, data.tobytes()),
    )


def differ(name: str, x: Any, y: Any) -> list[object]:
    """Outcomes of an operator, of the first to the third time, that differ from the language's."""
    wanted = outcome(OPERATORS[name], x, y)
    if isinstance(x, tl.tensor):
        found = [outcome(getattr(tl.tensor, f"__{name}__"), x, y) for _ in range(3)]
    else:
        found = [outcome(getattr(tl.tensor, f"__r{name}__"), y, x) for _ in range(3)]
    return [(x, y, each, wanted) for each in found if each != wanted]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_tensors_are_those_of_the_language(name):
    for left, right, (m, n) in itertools.product(TYPES, TYPES, PAIRS):
        assert not differ(name, tensor(left, m), tensor(right, n, 3))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_numbers_are_those_of_the_language(name):
    for kind, number, shape in itertools.product(TYPES, NUMBERS, ((), (4,), (2, 4))):
        assert not differ(name, tensor(kind, shape, 3), number)
        assert not differ(name, number, tensor(kind, shape, 3))


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_layout_of_the_language(name):
    for left, right in itertools.product((tl.int32, tl.float32, TYPES[-3]), (tl.int32, tl.int64)):
        for transposed in itertools.product((False, True), repeat=2):
            operands = [
                tensor(kind, (2, 4), 3, transposed=flag)
                for kind, flag in zip((left, right), transposed, strict=True)
            ]
            assert not differ(name, *operands)
            assert not differ(name, operands[0], tensor(right, (), 3))
            assert not differ(name, tensor(left, (), 3), operands[1])
            assert not differ(name, operands[0], 3)
            assert not differ(name, 3, operands[0])


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_a_scalar_comparison_acts_on_a_block_as_a_truth_value(name):
    block = tensor(tl.int1, (2, 4))
    compared = tensor(tl.int32, ()) < tensor(tl.int32, (), 3)
    assert not differ(name, block, compared)
    assert not differ(name, compared, block)
    assert OPERATORS[name](compared, block).handle.data.dtype == bool


def test_operands_that_do_not_hold_what_their_type_says_are_left_to_the_language():
    data = np.arange(3, 7, dtype=np.uint16)
    plain = made(data, tl.uint16, tl.uint16, (4,))
    # The builder computes by the types of handles.
    other = made(data, tl.bfloat16, tl.uint16, (4,))
    assert outcome(OPERATORS["add"], other, other) != outcome(OPERATORS["add"], plain, plain)
    for x, y in itertools.product((plain, other), repeat=2):
        assert not differ("add", x, y)
    for x in (plain, other):
        assert not differ("add", x, 2)


def test_constexprs_are_numbers():
    x = tensor(tl.float32, (4,))
    for number in (0.0, -0.0, 0, 1, 2.5):
        wanted = outcome(OPERATORS["mul"], x, number)
        assert outcome(tl.tensor.__mul__, x, tl.constexpr(number)) == wanted
        assert outcome(tl.tensor.__rmul__, x, tl.constexpr(number)) == wanted


def test_many_numbers_are_added_correctly():
    x = tensor(tl.int64, ())
    for number in (*range(3000), *range(3000)):
        assert (x + number).handle.data.tolist() == [number]


def test_overflow_raises_in_debug_mode_alone(monkeypatch):
    x = made(np.array([2**31 - 1], np.int32), tl.int32, tl.int32, ())
    builder = interpreter.interpreter_builder
    for debug in (False, True, False):
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=debug))
        for add in (lambda: x + x, lambda: x + 1):
            if debug:
                with pytest.raises(AssertionError, match="int32 overflow detected"):
                    add()
            else:
                assert add().handle.data[0] < 0
