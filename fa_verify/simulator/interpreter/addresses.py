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

__all__ = ["OutOfBoundsError", "Place", "place", "watch_addresses"]


Addresses = npt.NDArray[np.uint64]
Lanes = npt.NDArray[np.bool_]


class OutOfBoundsError(IndexError):
    """A kernel reads or writes outside of the tensors that its launch was given."""


class _Extent(NamedTuple):
    """The address range of a tensor's elements, end exclusive."""

    start: int
    end: int
    name: str


class Place(NamedTuple):
    """Elements of one range of memory.

    Args:
        elements: All elements of the range.
        indices: The indices of some of them.
    """

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
        # The first is of addresses below all ranges.
        self._origins = [np.uint64(start) for start in (0, *self.starts)]
        self._sizes = [0, *(end - start for start, end in merged)]
        self._ranges: dict[tuple[int, np.dtype[Any]], npt.NDArray[Any]] = {}

    def place(
        self, what: str, pointers: Addresses, lanes: Lanes | None, element: np.dtype[Any]
    ) -> Place | None:
        """Return the elements of some lanes; see the function ``place``."""
        if self.casts_pointers:
            return None
        addresses = pointers.ravel() if lanes is None else pointers[lanes]
        if not addresses.size:
            return Place(np.empty(0, element), np.empty(0, np.int64))
        size = element.itemsize
        number = bisect.bisect_right(self.starts, addresses.item(0))
        # Below the range, offsets wrap to numbers that exceed every size.
        offsets = addresses - self._origins[number]
        if int(np.maximum.reduce(offsets)) + size > self._sizes[number]:
            self.check(what, addresses, size)
            return None
        indices = offsets.view(np.int64)
        if size > 1:
            if int(np.bitwise_or.reduce(offsets)) & (size - 1):
                return None
            indices = (offsets >> np.uint64(size.bit_length() - 1)).view(np.int64)
        return Place(self._range(number, element), indices)

    def _range(self, number: int, element: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the elements of the range of memory that ends at ``ends[number]``."""
        if (number, element) not in self._ranges:
            start, end = self.starts[number - 1], self.ends[number]
            memory: Any = (ctypes.c_char * (end - start)).from_address(start)
            count = (end - start) // element.itemsize
            self._ranges[number, element] = np.frombuffer(memory, element, count)
        return self._ranges[number, element]

    def check(self, what: str, addresses: Addresses, size: int) -> None:
        """Raise OutOfBoundsError if ``size`` bytes at an address are outside of all tensors."""
        if self.casts_pointers:
            return
        number = np.searchsorted(np.array(self.starts, np.uint64), addresses, side="right")
        outside = addresses + np.uint64(size) > np.array(self.ends, np.uint64)[number]
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


_launch = _Launch(())


def place(
    what: str, pointers: Addresses, lanes: Lanes | None, element: np.dtype[Any]
) -> Place | None:
    """Return the elements that a kernel accesses.

    Args:
        what: The access, for the error.
        pointers: The addresses of all lanes.
        lanes: The lanes that are not masked off, in the shape of ``pointers``; None for all.
        element: The type of the elements.

    Returns:
        The elements in the order of their lanes; None if they are not all in one range of memory,
        at addresses of its elements.

    Raises:
        OutOfBoundsError: A lane that is not masked off is outside of all tensors.
    """
    return _launch.place(what, pointers, lanes, element)


def _lanes(pointers: Any, mask: Any) -> Lanes:
    """Return the lanes that a mask leaves, in the shape of the pointers."""
    lanes: Lanes = mask.data
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

    def arguments(self: Any, given: Any, kwargs: Any) -> Any:
        global _launch
        hosted, hosted_kwargs = original_arguments(self, given, kwargs)
        _launch = _Launch([*zip(self.arg_names, hosted, strict=False), *hosted_kwargs.items()])
        return hosted, hosted_kwargs

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        kind = pointers.get_element_ty()
        element, lanes = element_of(kind), _lanes(pointers, mask)
        found = place("reads", pointers.data, lanes, element)
        if found is not None:
            values = found.elements.take(found.indices)
            if values.size == lanes.size:
                return handle_of(values.reshape(lanes.shape), kind)
            if other is not None and other.data.dtype == element:
                filled = np.array(other.data, order="C")
                filled[lanes] = values
                return handle_of(filled, kind)
        return originals["create_masked_load"](self, pointers, mask, other, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        element, lanes = element_of(pointers.get_element_ty()), _lanes(pointers, mask)
        found = place("writes", pointers.data, lanes, element)
        if found is None:
            return originals["create_masked_store"](self, pointers, value, mask, *rest)
        found.elements[found.indices] = value.data[lanes]

    def check_update(pointers: Any, lanes: Any) -> None:
        element = element_of(pointers.get_element_ty())
        _launch.check("updates", pointers.data[lanes], element.itemsize)

    def update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_update(pointers, _lanes(pointers, mask))
        return originals["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def swap(self: Any, pointers: Any, *rest: Any) -> Any:
        check_update(pointers, ...)
        return originals["create_atomic_cas"](self, pointers, *rest)

    def cast(self: Any, *rest: Any) -> Any:
        _launch.casts_pointers = True
        return originals["create_int_to_ptr"](self, *rest)

    executor._init_args_hst = arguments
    builder.create_masked_load = load
    builder.create_masked_store = store
    builder.create_atomic_rmw = update
    builder.create_atomic_cas = swap
    builder.create_int_to_ptr = cast
