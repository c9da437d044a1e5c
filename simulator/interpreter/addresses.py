"""Check addresses in the interpreter, as a memory checker does on a GPU.

The interpreter of Triton 3.9 reads and writes at any address. The memory beside a tensor is usually
mapped, so an access out of bounds goes undetected or corrupts other data of the process.

It also copies every element by itself. Where all addresses lie in one range of memory, NumPy
indexes the range, which takes a tenth of the time in a large tile.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["OutOfBoundsError", "watch_addresses"]


class OutOfBoundsError(IndexError):
    """A kernel reads or writes outside of the tensors that its launch was given."""


class _Extent(NamedTuple):
    """The address range of a tensor's elements, end exclusive."""

    start: int
    end: int
    name: str


class _Place(NamedTuple):
    """Elements of one range of memory."""

    elements: npt.NDArray[Any]
    indices: npt.NDArray[np.int64]


class _Launch:
    """The memory that one launch may touch."""

    def __init__(self, arguments: Iterable[tuple[str, Any]]) -> None:
        self.extents = sorted(_extents(arguments))
        # A pointer cast from an integer may point anywhere.
        self.casts_pointers = False
        # Merge overlapping ranges: tensors may share or interleave their storage.
        merged: list[list[int]] = []
        for start, end, _ in self.extents:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts = [start for start, _ in merged]
        self.ends = [0, *(end for _, end in merged)]
        self._ranges: dict[tuple[int, np.dtype[Any]], npt.NDArray[Any]] = {}

    def place(self, what: str, pointers: Any, mask: Any, element: np.dtype[Any]) -> _Place | None:
        """Return the elements of the lanes that are not masked off, in order.

        Args:
            what: The access, for the error.
            pointers: The handle of the pointers.
            mask: The lanes, bool.
            element: The type of the elements.

        Returns:
            The place; None if there are no such lanes, or if their addresses are not those of
            elements of one range of memory.

        Raises:
            OutOfBoundsError: A lane that is not masked off is outside of all tensors.
        """
        if self.casts_pointers:
            return None
        addresses: npt.NDArray[np.uint64] = pointers.data[mask]
        if not addresses.size:
            return None
        low, high = int(addresses.min()), int(addresses.max())
        number = bisect.bisect_right(self.starts, low)
        size = element.itemsize
        if high + size > self.ends[number]:
            self._check(what, pointers, addresses)
            return None
        start = self.starts[number - 1]
        offsets = addresses - np.uint64(start)
        indices = offsets.view(np.int64)
        if size > 1:
            if (offsets & np.uint64(size - 1)).any():
                return None
            indices = (offsets >> np.uint64(size.bit_length() - 1)).view(np.int64)
        return _Place(self._range(number, element), indices)

    def _range(self, number: int, element: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the elements of the range of memory that ends at ``ends[number]``."""
        if (number, element) not in self._ranges:
            start, end = self.starts[number - 1], self.ends[number]
            memory = (ctypes.c_char * (end - start)).from_address(start)
            count = (end - start) // element.itemsize
            self._ranges[number, element] = np.frombuffer(memory, element, count)
        return self._ranges[number, element]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raise OutOfBoundsError if a lane that is not masked off is outside of all tensors."""
        if not self.casts_pointers:
            self._check(what, pointers, pointers.data[mask])

    def _check(self, what: str, pointers: Any, addresses: npt.NDArray[np.uint64]) -> None:
        """Raise OutOfBoundsError if an address is outside of all tensors."""
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8 or 1)
        place = np.searchsorted(np.array(self.starts, np.uint64), addresses, side="right")
        outside = addresses + size > np.array(self.ends, np.uint64)[place]
        if outside.any():
            where = self._nearest(int(addresses[outside].flat[0]))
            raise OutOfBoundsError(
                f"{what} {int(outside.sum())} of {addresses.size} elements outside of the tensors "
                f"of its launch, the first {where}"
            )

    def _nearest(self, address: int) -> str:
        """Describe an address relative to the nearest tensor below it, else above it."""
        if not self.extents:
            return "in a launch without tensors"
        below = bisect.bisect_right([extent.start for extent in self.extents], address)
        if below:
            end = max(extent.end for extent in self.extents[:below])
            return f"{address - end} bytes past the end of {self._named('end', end)}"
        start = self.extents[0].start
        return f"{start - address} bytes before {self._named('start', start)}"

    def _named(self, side: str, address: int) -> str:
        """Name the tensors that start or end at an address, one of which the kernel means.

        A launch may pass one tensor as several arguments, for example for those that it lacks.
        """
        return " or ".join(x.name for x in self.extents if getattr(x, side) == address)


def _extents(arguments: Iterable[tuple[str, Any]]) -> Iterator[_Extent]:
    """Yield the extents of all tensors in arguments, including tuples and descriptors."""
    for name, value in arguments:
        if isinstance(value, tuple | list):
            yield from _extents((f"{name}[{i}]", part) for i, part in enumerate(value))
        elif hasattr(value, "block_shape"):
            yield from _extents([(name, value.base)])
        elif hasattr(value, "data_ptr") and value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in steps)
            start = value.data_ptr()
            shown = f"{name}, shape {tuple(value.shape)}"
            yield _Extent(start, start + elements * value.element_size(), shown)


def _lanes(pointers: Any, mask: Any) -> npt.NDArray[np.bool_]:
    """Return the lanes that a mask leaves, in the shape of the pointers."""
    lanes: npt.NDArray[np.bool_] = mask.data
    if lanes.shape == pointers.data.shape:
        return lanes
    return np.broadcast_to(lanes, pointers.data.shape)


def watch_addresses(interpreter: Any) -> None:
    """Make loads, stores and atomics raise ``OutOfBoundsError`` outside of a launch's tensors.

    Loads and stores of one range of memory are made by NumPy.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    original_arguments = executor._init_args_hst
    handle_of, element_of = interpreter.TensorHandle, interpreter._get_np_dtype
    originals = {
        name: getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw",
                     "create_atomic_cas", "create_int_to_ptr")
    }  # fmt: skip
    launch = _Launch(())

    def arguments(self: Any, given: Any, kwargs: Any) -> Any:
        nonlocal launch
        hosted, hosted_kwargs = original_arguments(self, given, kwargs)
        launch = _Launch([*zip(self.arg_names, hosted, strict=False), *hosted_kwargs.items()])
        return hosted, hosted_kwargs

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        kind = pointers.get_element_ty()
        element, lanes = element_of(kind), _lanes(pointers, mask)
        place = launch.place("reads", pointers, lanes, element)
        if place is not None:
            values = place.elements.take(place.indices)
            if values.size == lanes.size:
                return handle_of(values.reshape(lanes.shape), kind)
            if other is not None and other.data.dtype == element:
                filled = np.array(other.data, order="C")
                filled[lanes] = values
                return handle_of(filled, kind)
        return originals["create_masked_load"](self, pointers, mask, other, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        element, lanes = element_of(pointers.get_element_ty()), _lanes(pointers, mask)
        place = launch.place("writes", pointers, lanes, element)
        if place is None or value.data.dtype != element:
            return originals["create_masked_store"](self, pointers, value, mask, *rest)
        place.elements[place.indices] = value.data[lanes]

    def update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.check("updates", pointers, _lanes(pointers, mask))
        return originals["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def swap(self: Any, pointers: Any, *rest: Any) -> Any:
        launch.check("updates", pointers, np.ones(pointers.data.shape, bool))
        return originals["create_atomic_cas"](self, pointers, *rest)

    def cast(self: Any, *rest: Any) -> Any:
        launch.casts_pointers = True
        return originals["create_int_to_ptr"](self, *rest)

    executor._init_args_hst = arguments
    builder.create_masked_load = load
    builder.create_masked_store = store
    builder.create_atomic_rmw = update
    builder.create_atomic_cas = swap
    builder.create_int_to_ptr = cast
