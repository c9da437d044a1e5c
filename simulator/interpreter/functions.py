"""Compute the most frequent functions of the language by a few calls of NumPy each.

See ``operators``. A function that has an argument of another form than those here, or that reads
memory as ``addresses`` cannot, is left to the language.
"""

from __future__ import annotations

from collections.abc import Callable
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
        (tl, "cast", plans.cast),
        (tl.tensor, "to", plans.cast),
        (tl.tensor, "__getitem__", plans.index),
    ):
        set_attr(owner, name, replacement(vars(owner)[name]))


class _Plans:
    """Makes functions that plan each set of types once, given the language's functions."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._semantic, self._like = interpreter.interpreter_semantic, tensors_like(interpreter)
        self._element_of = interpreter._get_np_dtype
        self._tensor, self._dtype = tl.tensor, tl.dtype

    def load(self, original: Function) -> Function:
        """Loads, with a mask and a number for the lanes that it leaves out, or without both."""
        tensor, numbers = self._tensor, (int, float)
        known: dict[tuple[object, ...], Function] = {}

        def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
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

        def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
            if (
                options
                or not (pointer.__class__ is value.__class__ is tensor)
                or not (mask is None or mask.__class__ is tensor)
            ):
                return original(pointer, value, mask, **options)
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
            known[start, end] = self._arange(result)
            return result

        return arange

    def _arange(self, result: Any) -> Function:
        build, data = self._like(result), result.handle.data
        # Data of tensors is never written; read-only arrays make a write raise.
        data.flags.writeable = False
        return lambda: build(data)
