"""Check addresses in the interpreter, as a memory checker does on a GPU.

The interpreter of Triton 3.9 reads and writes at any address. The memory beside a tensor is usually
mapped, so an access out of bounds goes undetected or corrupts other data of the process.
"""

from __future__ import annotations

import bisect
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
        self.starts = np.array([start for start, _ in merged], dtype=np.uint64)
        self.ends = np.array([end for _, end in merged], dtype=np.uint64)

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raise OutOfBoundsError if a lane that is not masked off is outside of all tensors."""
        if self.casts_pointers:
            return
        addresses: npt.NDArray[np.uint64] = pointers.data[
            np.broadcast_to(mask, pointers.data.shape)
        ]
        if not addresses.size:
            return
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8 or 1)
        place = np.searchsorted(self.starts, addresses, side="right")
        ends = np.concatenate([np.zeros(1, np.uint64), self.ends])[place]
        outside = addresses + size > ends
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


def watch_addresses(interpreter: Any) -> None:
    """Make loads, stores and atomics raise ``OutOfBoundsError`` outside of a launch's tensors.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    original_arguments = executor._init_args_hst
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

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launch.check("reads", pointers, mask.data)
        return originals["create_masked_load"](self, pointers, mask, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.check("writes", pointers, mask.data)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.check("updates", pointers, mask.data)
        return originals["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def swap(self: Any, pointers: Any, *rest: Any) -> Any:
        launch.check("updates", pointers, True)
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
