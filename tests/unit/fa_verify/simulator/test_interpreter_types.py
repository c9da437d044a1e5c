"""The interpreter's cached type rules give the language's results bitwise."""

from __future__ import annotations

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

# Functions of the language itself, and the cached ones that launches use.
OWN = semantic.TritonSemantic(interpreter.interpreter_builder)
LOOKED_UP = interpreter.interpreter_semantic
INTEGERS = ("int1", "int8", "uint8", "int32", "uint32", "int64", "uint64")
SCALARS = (*INTEGERS, "fp16", "bf16", "fp32", "fp64", "fp8e5")
TYPES = (
    *(tl.dtype(name) for name in SCALARS),
    tl.pointer_type(tl.float32),
    tl.pointer_type(tl.float16),
    tl.pointer_type(tl.float32, 3),
    tl.pointer_type(tl.pointer_type(tl.int8)),
)
SHAPES = ((), (1,), (4,), (1, 4), (2, 1), (2, 4), (8, 4))
PAIRS = (((), ()), ((), (4,)), ((2, 4), ()), ((4,), (4,)), ((2, 1), (1, 4)), ((4,), (2, 4)))
NUMBERS = (0, 1, -1, True, 0.0, -0.0, 1.0, 2.5, float("inf"), float("nan"), 300, 2**31, -(2**40))
# (pointer allowed left, pointer allowed right, promote types, is a division).
FLAGS = ((True, True, True, False), (False, False, True, True), (True, False, False, False))


@pytest.fixture(autouse=True)
def language() -> Iterator[None]:
    """Patches the language as a launch does."""
    scope = interpreter._patch_lang(None)
    yield
    scope.restore()


def tensor(kind: Any, shape: tuple[int, ...], start: int = 0) -> Any:
    """A tensor of distinct numbers, if the type has enough, that few types hold exactly."""
    data = 1.37 * np.arange(start, start + int(np.prod(shape))).reshape(shape or (1,))
    handle = interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(kind)), kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Callable[..., Any], *args: Any) -> object:
    """A comparable form of the tensors that a function returns, or of its error."""
    try:
        made = function(*args)
    except Exception as error:
        return type(error), str(error)
    return [
        (
            *(type(x.type), str(x.type), address_space(x.dtype), [int(n) for n in x.shape]),
            *(int(x.numel), str(x.dtype), str(x.handle.dtype), x.handle.data.dtype),
            *(x.handle.data.shape, x.handle.data.tobytes()),
        )
        for x in (made if isinstance(made, tuple) else (made,))
    ]


def address_space(kind: Any) -> object:
    return getattr(kind, "address_space", None)


def differ(name: str, *args: Any) -> list[object]:
    """Cached outcomes of a method, of the first and the second call, that differ from its own."""
    wanted = outcome(getattr(OWN, name), *args)
    found = [outcome(getattr(LOOKED_UP, name), *args) for _ in range(2)]
    return [(args, x, wanted) for x in found if x != wanted]


@pytest.mark.parametrize("left", TYPES, ids=str)
def test_operands_of_all_types_are_converted_as_by_the_language(left):
    for right, (m, n), flags in itertools.product(TYPES, PAIRS, FLAGS):
        operands = tensor(left, m), tensor(right, n, 3)
        assert not differ("binary_op_type_checking_impl", *operands, *flags)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_numbers_are_converted_as_by_the_language(kind):
    for number, shape, flags in itertools.product(NUMBERS, ((), (4,), (2, 4)), FLAGS):
        for operands in ((tensor(kind, shape), number), (number, tensor(kind, shape))):
            assert not differ("binary_op_type_checking_impl", *operands, *flags)


def test_a_number_of_another_sign_or_kind_is_another_number():
    x = tensor(tl.float32, (4,))
    for number in (0.0, -0.0, 0, 1, 1.0, True, float("nan")):
        assert not differ("binary_op_type_checking_impl", x, number, *FLAGS[0])


@pytest.mark.parametrize("source", TYPES, ids=str)
def test_casts_equal_those_of_the_language(source):
    for target, shape, rounding in itertools.product(TYPES, SHAPES, (None, "rtne", "rtz")):
        assert not differ("cast", tensor(source, shape), target, rounding)


@pytest.mark.parametrize("kind", [tl.float32, tl.pointer_type(tl.float32, 3)], ids=str)
def test_shapes_are_broadcast_as_by_the_language(kind):
    for (m, n), other in itertools.product(itertools.product(SHAPES, SHAPES), TYPES):
        assert not differ("broadcast_impl_value", tensor(kind, m), tensor(other, n, 3))


def test_many_numbers_are_looked_up_correctly():
    x = tensor(tl.int64, ())
    for number in range(3000):
        for _ in range(2):
            _, made = LOOKED_UP.binary_op_type_checking_impl(x, number, *FLAGS[0])
            assert made.handle.data.tolist() == [number]


def test_cached_type_results_are_read_only():
    x = tensor(tl.float32, (4,))
    for _ in range(2):
        _, made = LOOKED_UP.binary_op_type_checking_impl(x, 7.0, *FLAGS[0])
        with pytest.raises(ValueError, match="read-only"):
            made.handle.data[0] = 1.0
