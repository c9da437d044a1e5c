"""Compute the operators of tensors by one call of NumPy each.

For ``x + y`` the language converts both operands to one type and broadcasts them, and its builder
then calls NumPy, which broadcasts by itself. All that precedes this call takes ten times as long.
It depends on the types of the operands alone, so it happens once for each pair of types.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.simulator.interpreter.types import tensors_like

__all__ = ["compute_operators_directly"]

Array = npt.NDArray[Any]
Binary = Callable[[Array, Array], Array]

# Largest number of numbers for which an operator has plans.
_MOST_NUMBERS = 1024
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("fp16", "fp32", "fp64")
# The types of which NumPy's functions are the language's. Integers of one bit wrap around.
_NUMBERS = (*_INTEGERS, *_FLOATS)
_BITS = (*_INTEGERS, "int1")
# Types that ``astype`` converts to one of _NUMBERS, as the builder does.
_CONVERTED = (*_NUMBERS, "int1")


class _Operator(NamedTuple):
    """An operator of tensors.

    Args:
        function: NumPy's function of converted operands.
        kinds: The types of converted operands of which the function is the operator.
        check: The language's check of the operands' types.
        flags: Further arguments of the check.
    """

    function: Binary
    kinds: tuple[str, ...] = _NUMBERS
    check: str = "binary_op_type_checking_impl"
    flags: tuple[bool, ...] = ()


def _floor_divided(x: Array, y: Array, **order: Any) -> Array:
    """Return the quotient of integers, rounded toward zero, as the builder computes it."""
    quotient: Array = np.floor_divide(x - np.fmod(x, y), y, **order)
    return quotient


_DIVISION = (False, False, True, True)
_BITWISE = "bitwise_op_type_checking_impl"
_OPERATORS = {
    "add": _Operator(np.add, flags=(True, True)),
    "sub": _Operator(np.subtract, flags=(True, False)),
    "mul": _Operator(np.multiply),
    "truediv": _Operator(np.divide, _FLOATS, flags=_DIVISION),
    "floordiv": _Operator(_floor_divided, _INTEGERS, flags=_DIVISION),
    "mod": _Operator(np.fmod, flags=_DIVISION),
    "lt": _Operator(np.less),
    "le": _Operator(np.less_equal),
    "gt": _Operator(np.greater),
    "ge": _Operator(np.greater_equal),
    "eq": _Operator(np.equal),
    "ne": _Operator(np.not_equal),
    "and": _Operator(np.bitwise_and, _BITS, _BITWISE),
    "or": _Operator(np.bitwise_or, _BITS, _BITWISE),
    "xor": _Operator(np.bitwise_xor, _BITS, _BITWISE),
}


# Functions that take tensors as operators do. Unless asked otherwise, they ignore NaN.
_FUNCTIONS = {"maximum": _Operator(np.fmax), "minimum": _Operator(np.fmin)}

# A function of the handle of an operator's tensor and of its other operand.
_Plan = Callable[[Any, Any], Any]


def compute_operators_directly(
    interpreter: Any, set_attr: Callable[[Any, str, object], None]
) -> None:
    """Make operators look up how they are computed.

    Results and errors do not change, nor the layout of results other than pointers.

    Args:
        interpreter: The module ``triton.runtime.interpreter``, after ``work_types_out_once``.
        set_attr: Function (owner, name, value) that replaces an attribute of the language inside
            launches.
    """
    import triton.language as tl

    plans = _Plans(interpreter, tl)
    for name, operator in _OPERATORS.items():
        for attribute, reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            original = vars(tl.tensor)[attribute]
            set_attr(tl.tensor, attribute, plans.method(operator, original, reflected))
    for name, operator in _FUNCTIONS.items():
        set_attr(tl, name, plans.function(operator, vars(tl)[name]))


class _Plans:
    """Makes the methods of operators, which plan each pair of types once."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._semantic, self._like = interpreter.interpreter_semantic, tensors_like(interpreter)
        self._tensor, self._pointer, self._constexpr = tl.tensor, tl.pointer_type, tl.constexpr
        self._element_of = interpreter._get_np_dtype

    def method(
        self, operator: _Operator, original: Callable[..., Any], reflected: bool
    ) -> Callable[..., Any]:
        """Return a replacement of an operator's method.

        Args:
            operator: The operator.
            original: The method of tensors.
            reflected: Whether the tensor is the right operand.
        """
        tensor, constexpr, builder = self._tensor, self._constexpr, self._semantic.builder
        of_tensors: dict[tuple[int, int], _Plan] = {}
        of_numbers: dict[tuple[int, type, float | str], _Plan] = {}

        def learn(x: Any, y: Any) -> Any:
            result = original(x, y)
            plan = self._plan(operator, x, y, result, reflected)
            if plan is not None:
                if y.__class__ is tensor:
                    of_tensors[x._kind, y._kind] = plan
                else:
                    if len(of_numbers) >= _MOST_NUMBERS:
                        of_numbers.clear()
                    of_numbers[x._kind, y.__class__, y or repr(y)] = plan
            return result

        def call(x: Any, y: Any, _semantic: object = None) -> Any:
            kind = y.__class__
            if kind is tensor:
                plan = of_tensors.get((x._kind, y._kind))
            elif kind is int or kind is float:
                # 0.0 equals -0.0.
                plan = of_numbers.get((x._kind, kind, y or repr(y)))
            elif kind is constexpr:
                return call(x, y.value)
            else:
                return original(x, y)
            # The language checks for overflow in debug mode.
            if plan is None or builder.options.debug:
                return learn(x, y)
            return plan(x.handle, y)

        return call

    def function(self, operator: _Operator, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of a function of two operands."""
        tensor, method = self._tensor, self.method(operator, original, reflected=False)

        def call(x: Any, y: Any, *rest: Any, **options: Any) -> Any:
            if rest or options or x.__class__ is not tensor:
                return original(x, y, *rest, **options)
            return method(x, y)

        return call

    def _plan(
        self, operator: _Operator, of: Any, other: Any, result: Any, reflected: bool
    ) -> _Plan | None:
        """Return a plan for operands of these types; None if there is none.

        Args:
            operator: The operator.
            of: The tensor whose method it is.
            other: The other operand, a tensor or a number.
            result: The result of the language.
            reflected: Whether ``of`` is the right operand.
        """
        given = (other, of) if reflected else (of, other)
        is_tensor = [x.__class__ is self._tensor for x in given]
        tensors = list(compress(given, is_tensor))
        if any(x._kind is None for x in (*tensors, result)):
            return None
        x, y = getattr(self._semantic, operator.check)(*given, *operator.flags)
        function = self._function(operator, x.dtype, y.dtype)
        if function is None:
            return None
        blocks = [x for x in tensors if x.shape]
        if len(result.shape) > 1 and len(blocks) < len(given):
            # The language makes a block of the other operand, in C order.
            function = _in_c_order(function)
        for place, (operand, target) in enumerate(zip(given, (x.dtype, y.dtype), strict=True)):
            if is_tensor[place] and operand.dtype.name != target.name:
                if operand.dtype.name not in _CONVERTED:
                    return None
                function = _after_conversion(function, place, self._element_of(target))
        build = self._like(result)
        if all(is_tensor):
            return lambda x, y: build(function(x.data, y.handle.data))
        number = (x if reflected else y).handle.data.ravel()[:1].copy()
        if reflected:
            return lambda x, _: build(function(number, x.data))
        return lambda x, _: build(function(x.data, number))

    def _function(self, operator: _Operator, left: Any, right: Any) -> Binary | None:
        """Return the function of converted operands of these types; None if there is none."""
        pointers = [x.__class__ is self._pointer for x in (left, right)]
        if any(pointers):
            pointer, offset = (right, left) if pointers[1] else (left, right)
            if operator.function is not np.add or offset.name not in _INTEGERS:
                return None
            width = max(1, pointer.element_ty.primitive_bitwidth // 8)
            return _moved(width, reflected=pointers[1])
        if left.name != right.name or left.name not in operator.kinds:
            return None
        return operator.function


def _moved(width: int, *, reflected: bool) -> Callable[..., Array]:
    """Return the sum of pointers and offsets in elements of ``width`` bytes."""

    def moved(x: Array, y: Array, **order: Any) -> Array:
        pointers, offsets = (y, x) if reflected else (x, y)
        total: Array = np.add(pointers, width * offsets.astype(np.uint64), **order)
        return total

    return moved


def _in_c_order(function: Callable[..., Array]) -> Binary:
    """Return the function with a result in C order."""
    return lambda x, y: function(x, y, order="C")


def _after_conversion(function: Binary, place: int, element: npt.DTypeLike) -> Binary:
    """Return the function of operands of which one is converted first."""
    if place:
        return lambda x, y: function(x, y.astype(element))
    return lambda x, y: function(x.astype(element), y)
