"""Allocations inside guard bands, so that a write beside a tensor shows, whoever allocates it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GuardBands", "Overrun"]

# On each side; a multiple of every alignment that a kernel may count on.
_GUARD_BYTES = 1024
_GUARD = 0xA5
_aten = torch.ops.aten
# What makes an uninitialised tensor, and where its size, and the tensor it is like, stand.
_SIZED = (_aten.empty.memory_format, _aten.new_empty.default)
_STRIDED = (_aten.empty_strided.default, _aten.new_empty_strided.default)
_LIKE = (_aten.empty_like.default,)


class Overrun(NamedTuple):
    """A guard band that was written to.

    Args:
        tensor: The allocation beside it.
        offset: Index of the first byte written, relative to the tensor: negative before it, counted
            from its end after it.
        before: Whether the band lies before the tensor.
    """

    tensor: torch.Tensor
    offset: int
    before: bool


class GuardBands(TorchDispatchMode):
    """Inside the block, uninitialised tensors lie between guard bands and start as NaN.

    It sees what Python code, or autograd on its behalf, allocates by ``torch.empty``,
    ``torch.empty_like`` and their like; not what a library allocates inside an operator of its own.
    Integers start as the bytes of the guard.
    """

    def __init__(self) -> None:
        """Starts without allocations."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._allocations: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of the base class
        """Replaces an allocation; lets everything else pass."""
        made = func(*args, **(kwargs or {}))
        if func not in (*_SIZED, *_STRIDED, *_LIKE) or not made.numel() or made.is_meta:
            return made
        return self._guarded(made)

    def _guarded(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the same form inside guard bands."""
        reach = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        size = like.element_size()
        band = torch.full(
            (2 * _GUARD_BYTES + size * reach,), _GUARD, dtype=torch.uint8, device=like.device
        )
        own = band[_GUARD_BYTES : _GUARD_BYTES + size * reach].view(like.dtype)
        if like.is_floating_point():
            own.fill_(math.nan)
        tensor = own.as_strided(like.shape, like.stride())
        self._allocations.append((tensor, band))
        return tensor

    def overruns(self) -> Sequence[Overrun]:
        """The guard bands that were written to, in the order of allocation."""
        found = []
        for tensor, band in self._allocations:
            before, after = band[:_GUARD_BYTES], band[-_GUARD_BYTES:]
            for part, is_before in ((before, True), (after, False)):
                written = (part != _GUARD).nonzero()
                if written.numel():
                    first = int(written[-1 if is_before else 0])
                    found.append(
                        Overrun(tensor, first - _GUARD_BYTES if is_before else first, is_before)
                    )
        return found

    @property
    def count(self) -> int:
        """How many allocations were guarded."""
        return len(self._allocations)
