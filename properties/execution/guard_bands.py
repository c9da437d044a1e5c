"""Allocations inside guard bands, so that a write beside a tensor shows, whoever allocates it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GuardBands", "Overrun"]

# On each side; a multiple of every alignment that a kernel may count on.
_GUARD_BYTES = 1024
_GUARD = 0xA5
_aten = torch.ops.aten
_UNINITIALISED = (
    _aten.empty.memory_format,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
# Accumulators start as 0; kernels write to them as to any other.
_OF_ONE_VALUE = (
    _aten.zeros.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
    _aten.ones.default,
    _aten.ones_like.default,
    _aten.new_ones.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.new_full.default,
)


class Overrun(NamedTuple):
    """A guard band that was written to.

    Args:
        tensor: The allocation beside it.
        offset: The written byte nearest to the tensor: -1 is the last one before it, 0 the first
            one after it.
        before: Whether the band lies before the tensor.
    """

    tensor: torch.Tensor
    offset: int
    before: bool


class GuardBands(TorchDispatchMode):
    """Inside the block, new tensors lie between guard bands, and uninitialised ones start as NaN.

    It sees what Python code, or autograd on its behalf, allocates by ``torch.empty``,
    ``torch.zeros``, ``torch.full`` and their like; not what a library allocates inside an operator
    of its own, unless Python functions are its kernels, or what compiled code allocates.
    Uninitialised integers are the bytes of the guard. Tensors without elements stay as they are.
    """

    # What a subject does by torch.compile, and by its operators, it does here too: in eager code
    # in its place something else would be verified.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run as it is."""
        return True

    def __init__(self) -> None:
        """Starts without allocations."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._allocations: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of the base class
        """Replaces an allocation; lets everything else pass."""
        if backend := _python_kernel(func, args):
            # Below the modes nothing that it allocates would be seen.
            with self:
                return func.redispatch(backend, *args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if func not in (*_UNINITIALISED, *_OF_ONE_VALUE):
            return made
        if made.layout is not torch.strided or made.is_meta or not made.numel():
            return made
        return self._guarded(made, initialised=func in _OF_ONE_VALUE)

    def _guarded(self, like: torch.Tensor, *, initialised: bool) -> torch.Tensor:
        """A tensor of the same form inside guard bands, of the same values if they mean any."""
        reach = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        size = like.element_size()
        band = torch.full(
            (2 * _GUARD_BYTES + size * reach,), _GUARD, dtype=torch.uint8, device=like.device
        )
        own = band[_GUARD_BYTES : _GUARD_BYTES + size * reach].view(like.dtype)
        tensor = own.as_strided(like.shape, like.stride())
        if initialised:
            tensor.copy_(like)
        elif like.is_floating_point() or like.is_complex():
            own.fill_(math.nan)
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


# PyTorch wraps the method so that torch.compile leaves it alone. The wrapper imports
# torch._dynamo, which takes 2 s and is of use only if something else has imported it too.
_without_dynamo = GuardBands.__torch_dispatch__


def _dispatch(
    self: GuardBands, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:  # the signature of the base class
    """Calls the method itself until torch._dynamo is imported, then PyTorch's wrapper of it."""
    method = _without_dynamo
    if "torch._dynamo" not in sys.modules:
        method = getattr(method, "__wrapped__", method)
    return method(self, func, types, args, kwargs)


GuardBands.__torch_dispatch__ = _dispatch  # type: ignore[method-assign]


def _python_kernel(func: Any, args: Sequence[Any]) -> Any:
    """Where an operator of others has a Python function for its tensors' device; None without."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "prims"):
        return None
    for x in args:
        if isinstance(x, torch.Tensor):
            return _backend(func, x.device.type)
    return None


@lru_cache(maxsize=256)
def _backend(func: Any, device: str) -> Any:
    """The key of the device, if a Python function is registered there; None if none is."""
    key = torch._C._dispatch_key_for_device(device)
    registered: Any = torch.library._impls
    name = func.name().replace("::", "/")
    if not registered & {f"{name}/{x}" for x in (key, "CompositeExplicitAutograd")}:
        return None
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
