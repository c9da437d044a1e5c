"""Compute the most frequent functions of the language by a few calls of NumPy each.

See ``operators``. A function that has an argument of another form than those here, or that reads
memory as ``addresses`` cannot, is left to the language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_verify.simulator.interpreter.addresses import place
from fa_verify.simulator.interpreter.types import ONE_CAST, tensors_like

__all__ = ["compute_functions_directly"]

Array = npt.NDArray[Any]
Function = Callable[..., Any]

# Largest number of calls of a function with different numbers that have plans.
_MOST_NUMBERS = 1024
# Largest number of blocks that are kept, of 256 KiB or less each.
_MOST_BLOCKS = 64
_ALL = slice(None)


def compute_functions_directly(
    interpreter: Any, set_attr: Callable[[Any, str, object], None]
) -> None:
    """Make functions look up how they are computed. Results and errors do not change.

    Args:
        interpreter: The module ``triton.runtime.interpreter``, after ``work_types_out_once``.
        set_attr: Function (owner, name, value) that replaces an attribute of the language inside
            launches.
    """
    import triton.language as tl

    plans = _Plans(interpreter, tl)
    for owner, name, replacement in (
        (tl, "load", plans.load),
        (tl, "store", plans.store),
        (tl, "arange", plans.arange),
        (tl, "full", plans.full),
        # zeros calls it.
        (tl.core, "full", plans.full),
        (tl, "cast", plans.cast),
        (tl, "dot", plans.dot),
        (tl, "reshape", plans.reshape),
        (tl, "split", plans.split),
        (tl, "where", plans.where),
        (tl.tensor, "to", plans.cast),
        (tl.tensor, "__getitem__", plans.index),
    ):
        set_attr(owner, name, replacement(vars(owner)[name]))


class _Plans:
    """Makes functions that plan each set of types once, given the language's functions."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._semantic, self._like = interpreter.interpreter_semantic, tensors_like(interpreter)
        self._element_of = interpreter._get_np_dtype
        self._tensor, self._dtype, self._constexpr = tl.tensor, tl.dtype, tl.constexpr

    def load(self, original: Function) -> Function:
        """Loads, with a mask and a number for the lanes that it leaves out, or without both."""
        tensor, numbers = self._tensor, (int, float)
        known: dict[tuple[object, ...], Function] = {}

        def load(
            pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any
        ) -> Any:  # fmt: skip
            if rest:
                return original(pointer, mask, other, *rest, **options)
            if mask is None is other and pointer.__class__ is tensor:
                key: tuple[object, ...] = (pointer._kind,)
            elif (
                pointer.__class__ is tensor and mask.__class__ is tensor
            ) and other.__class__ in numbers:
                # 0.0 equals -0.0.
                key = (pointer._kind, mask._kind, other.__class__, other or repr(other))
            else:
                return original(pointer, mask, other, **options)
            plan = None if options else known.get(key)
            if plan is not None:
                return plan(pointer, mask)
            result = original(pointer, mask, other, **options)
            # The language reads int1 as int8.
            as_it_is = result._kind is not None and pointer.dtype.element_ty.name != "int1"
            if not options and None not in key and as_it_is:
                if len(known) >= _MOST_NUMBERS:
                    known.clear()
                known[key] = self._load(pointer, other, result, original)
            return result

        return load

    def _load(self, pointer: Any, other: Any, result: Any, original: Function) -> Function:
        build, element, shape = (
            self._like(result),
            result.handle.data.dtype,
            result.handle.data.shape,
        )
        moves = pointer.handle.data.shape != shape
        fill = np.empty(1, element)
        if other is not None:
            number = self._semantic.to_tensor(other)
            fill = self._semantic.cast(number, pointer.dtype.element_ty).handle.data

        def plan(pointer: Any, mask: Any) -> Any:
            pointers = pointer.handle.data
            if moves:
                pointers = np.broadcast_to(pointers, shape)
            lanes = None
            if mask is not None:
                lanes = mask.handle.data
                if lanes.shape != shape:
                    lanes = np.broadcast_to(lanes, shape)
            found = place("reads", pointers, lanes, element)
            if found is None:
                return original(pointer, mask, other)
            values = found.elements.take(found.indices)
            if values.size == pointers.size:
                return build(values.reshape(shape))
            data = np.empty(shape, element)
            data[...] = fill
            data[lanes] = values
            return build(data)

        return plan

    def store(self, original: Function) -> Function:
        """Stores of values that have the type of the elements and the shape of the pointers."""
        tensor = self._tensor
        known: dict[tuple[object, ...], Function] = {}

        def store(
            pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any
        ) -> Any:  # fmt: skip
            if (
                rest
                or options
                or not (pointer.__class__ is value.__class__ is tensor)
                or not (mask is None or mask.__class__ is tensor)
            ):
                return original(pointer, value, mask, *rest, **options)
            key = (pointer._kind, value._kind, -1 if mask is None else mask._kind)
            plan = known.get(key)
            if plan is not None:
                return plan(pointer, value, mask)
            result = original(pointer, value, mask)
            shapes = [x.handle.data.shape for x in (pointer, value, mask) if x is not None]
            fits = shapes[0] == shapes[1] == np.broadcast_shapes(*shapes)
            if None not in key and fits and pointer.dtype.element_ty.name == value.dtype.name:
                known[key] = self._store(pointer, result, original)
            return result

        return store

    def _store(self, pointer: Any, result: Any, original: Function) -> Function:
        shape, element = pointer.handle.data.shape, self._element_of(pointer.dtype.element_ty)

        def plan(pointer: Any, value: Any, mask: Any) -> Any:
            values, lanes = value.handle.data, None
            if mask is not None:
                lanes = mask.handle.data
                if lanes.shape != shape:
                    lanes = np.broadcast_to(lanes, shape)
            found = place("writes", pointer.handle.data, lanes, element)
            if found is None:
                return original(pointer, value, mask)
            found.elements[found.indices] = values.ravel() if lanes is None else values[lanes]
            return result

        return plan

    def cast(self, original: Function) -> Function:
        """Casts of tensors that take no rounding mode."""
        tensor, scalar = self._tensor, self._dtype
        known: dict[tuple[int, str], Function] = {}

        def cast(input: Any, dtype: Any, *rest: Any, **options: Any) -> Any:
            if rest or options or input.__class__ is not tensor or dtype.__class__ is not scalar:
                return original(input, dtype, *rest, **options)
            plan = known.get((input._kind, dtype.name))
            if plan is not None:
                return plan(input)
            result = original(input, dtype)
            if input._kind is not None and result._kind is not None:
                plan = self._cast(input, result)
                if plan is not None:
                    known[input._kind, dtype.name] = plan
            return result

        return cast

    def _cast(self, x: Any, result: Any) -> Function | None:
        if result is x:
            return lambda x: x
        source, target = x.dtype, result.dtype
        if (source.name, target.name) not in ONE_CAST:
            return None
        build = self._like(result)
        if "bf16" in (source.name, target.name):
            cast = self._semantic.builder.cast_impl
            return lambda x: build(cast(x.handle, target).data)
        element = self._element_of(target)
        return lambda x: build(x.handle.data.astype(element))

    def index(self, original: Function) -> Function:
        """Indices that make a row or a column of a block."""
        known: dict[tuple[int, bool], Function] = {}

        def index(x: Any, places: Any) -> Any:
            if places.__class__ is not tuple or len(places) != 2:
                return original(x, places)
            first, second = places
            if not (first is None and second.__class__ is slice and second == _ALL) and not (
                second is None and first.__class__ is slice and first == _ALL
            ):
                return original(x, places)
            plan = known.get((x._kind, first is None))
            if plan is not None:
                return plan(x)
            result = original(x, places)
            if x._kind is not None and result._kind is not None:
                known[x._kind, first is None] = self._index(result)
            return result

        return index

    def _index(self, result: Any) -> Function:
        build, shape = self._like(result), result.handle.data.shape
        return lambda x: build(x.handle.data.reshape(shape))

    def arange(self, original: Function) -> Function:
        """Ranges between two numbers."""
        known: dict[tuple[int, int], Function] = {}

        def arange(start: Any, end: Any) -> Any:
            if not (start.__class__ is end.__class__ is int):
                return original(start, end)
            plan = known.get((start, end))
            if plan is not None:
                return plan()
            result = original(start, end)
            if len(known) >= _MOST_NUMBERS:
                known.clear()
            known[start, end] = self._kept(result)
            return result

        return arange

    def _kept(self, result: Any) -> Function:
        build, data = self._like(result), result.handle.data
        # Data of tensors is never written; read-only arrays make a write raise.
        data.flags.writeable = False
        return lambda: build(data)

    def full(self, original: Function) -> Function:
        """Blocks of a number."""
        scalar, constexpr = self._dtype, self._constexpr
        known: dict[tuple[object, ...], Function] = {}

        def full(shape: Any, value: Any, dtype: Any) -> Any:
            name = dtype.value if dtype.__class__ is constexpr else dtype
            kind = value.__class__
            if shape.__class__ is not list or name.__class__ is not scalar:
                return original(shape, value, dtype)
            if not (kind is int or kind is float):
                return original(shape, value, dtype)
            sizes = tuple([x.value if x.__class__ is constexpr else x for x in shape])
            # 4.0 equals 4.
            if any(x.__class__ is not int for x in sizes):
                return original(shape, value, dtype)
            # 0.0 equals -0.0.
            key = (sizes, kind, value or repr(value), name.name)
            plan = known.get(key)
            if plan is not None:
                return plan()
            result = original(shape, value, dtype)
            if len(known) >= _MOST_BLOCKS:
                known.clear()
            known[key] = self._kept(result)
            return result

        return full

    def dot(self, original: Function) -> Function:
        """Products of tensors at a given precision."""
        tensor = self._tensor
        known: dict[tuple[object, ...], Function] = {}

        def dot(
            input: Any, other: Any, acc: Any = None, input_precision: Any = None,
            *rest: Any, out_dtype: Any = None, **options: Any,
        ) -> Any:  # fmt: skip
            options |= {"out_dtype": out_dtype}
            if (
                rest
                or len(options) > 1
                or not (input.__class__ is other.__class__ is tensor)
                or not (acc is None or acc.__class__ is tensor)
                or input_precision.__class__ is not str
            ):
                return original(input, other, acc, input_precision, *rest, **options)
            kind = -1 if acc is None else acc._kind
            name = None if out_dtype is None else out_dtype.name
            key = (input._kind, other._kind, kind, input_precision, name)
            plan = known.get(key)
            if plan is not None:
                return plan(input, other, acc)
            with self._recorded("create_dot") as calls:
                result = original(input, other, acc, input_precision, **options)
            if None not in (input._kind, other._kind, kind, result._kind) and len(calls) == 1:
                (a, b, start, *precision), made = calls[0]
                unchanged = a is input.handle and b is other.handle and made is result.handle
                if unchanged and (acc is None or start is acc.handle):
                    known[key] = self._dot(None if acc is not None else start, precision, result)
            return result

        return dot

    @contextmanager
    def _recorded(self, name: str) -> Iterator[list[tuple[tuple[Any, ...], Any]]]:
        """Yield a list of the arguments and results of the builder's calls of a method."""
        builder, calls = self._semantic.builder, []
        method = getattr(builder, name)

        def recording(*args: Any) -> Any:
            calls.append((args, method(*args)))
            return calls[-1][1]

        setattr(builder, name, recording)
        try:
            yield calls
        finally:
            delattr(builder, name)

    def _dot(self, zeros: Any, precision: list[Any], result: Any) -> Function:
        build, builder = self._like(result), self._semantic.builder

        def plan(a: Any, b: Any, acc: Any) -> Any:
            start = zeros if acc is None else acc.handle
            return build(builder.create_dot(a.handle, b.handle, start, *precision).data)

        return plan

    def reshape(self, original: Function) -> Function:
        """Shapes that are one tuple or list of ints."""
        tensor, constexpr = self._tensor, self._constexpr
        known: dict[tuple[int, tuple[int, ...]], Function] = {}

        def reshape(input: Any, *shape: Any, **options: Any) -> Any:
            if (
                options
                or input.__class__ is not tensor
                or len(shape) != 1
                or shape[0].__class__ not in (tuple, list)
            ):
                return original(input, *shape, **options)
            sizes = tuple([x.value if x.__class__ is constexpr else x for x in shape[0]])
            plan = known.get((input._kind, sizes))
            if plan is not None:
                return plan(input)
            result = original(input, *shape)
            if input._kind is not None and result._kind is not None:
                known[input._kind, sizes] = self._index(result)
            return result

        return reshape

    def split(self, original: Function) -> Function:
        """Halves of blocks that have further axes."""
        tensor = self._tensor
        known: dict[int, Function] = {}

        def split(a: Any) -> Any:
            plan = known.get(a._kind) if a.__class__ is tensor else None
            if plan is not None:
                return plan(a)
            result = original(a)
            if len(a.shape) > 1 and None not in (a._kind, *(x._kind for x in result)):
                known[a._kind] = self._split(result[0])
            return result

        return split

    def _split(self, result: Any) -> Function:
        build = self._like(result)

        def plan(a: Any) -> Any:
            data = a.handle.data
            return build(data[..., 0]), build(data[..., 1])

        return plan

    def where(self, original: Function) -> Function:
        """Choices among tensors and numbers of one type."""
        tensor = self._tensor
        known: dict[tuple[object, ...], Function] = {}

        def key_of(x: Any) -> object:
            """The key of an operand; None for one that has no plan."""
            kind = x.__class__
            if kind is tensor:
                return x._kind
            # 0.0 equals -0.0.
            return (kind, x or repr(x)) if kind is int or kind is float else None

        def where(condition: Any, x: Any, y: Any) -> Any:
            if condition.__class__ is not tensor:
                return original(condition, x, y)
            key = (condition._kind, key_of(x), key_of(y))
            plan = known.get(key)
            if plan is not None:
                return plan(condition, x, y)
            result = original(condition, x, y)
            if None not in key and result._kind is not None:
                plan = self._where(condition, x, y, result, original)
                if plan is not None:
                    if len(known) >= _MOST_NUMBERS:
                        known.clear()
                    known[key] = plan
            return result

        return where

    def _where(
        self, condition: Any, x: Any, y: Any, result: Any, original: Function
    ) -> Function | None:
        given = [each for each in (x, y) if each.__class__ is self._tensor]
        if any(each.dtype.name != result.dtype.name for each in given):
            return None
        if condition.dtype.name != "int1" or not given:
            return None
        build, tensor = self._like(result), self._tensor
        converted = self._semantic.binary_op_type_checking_impl(x, y, True, True)
        first, second = (each.handle.data.ravel()[:1].copy() for each in converted)

        def plan(condition: Any, x: Any, y: Any) -> Any:
            data = np.where(
                condition.handle.data,
                x.handle.data if x.__class__ is tensor else first,
                y.handle.data if y.__class__ is tensor else second,
            )
            # The language makes blocks of scalars, whose layout the result has.
            return build(data) if data.flags.c_contiguous else original(condition, x, y)

        return plan
