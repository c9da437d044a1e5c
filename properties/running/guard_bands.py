"""Guard bands around new tensors, which detect writes out of bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OTHER_FILL", "GuardBands", "Overrun", "fill_of"]

# A value of uninitialised memory beside NaN, exact in every dtype.
OTHER_FILL = -2.75

# Size on each side, a multiple of every alignment that a kernel may rely on.
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
# Accumulators start at 0. Kernels write to them as well.
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


def fill_of(seed: int) -> float:
    """Return what unused memory holds in a call: NaN for even seeds, a plausible number for odd.

    NaN in the place of a number can be right by luck: no maximum is below it.
    """
    return (math.nan, OTHER_FILL, math.nan, -OTHER_FILL)[seed % 4]


class Overrun(NamedTuple):
    """A guard band that was written to.

    Args:
        tensor: The tensor between the guard bands.
        offset: The changed byte nearest to the tensor: -1 is the last one before it, 0 the first
            one after it. A byte that was written with the value of the band is not changed.
        before: Whether the band lies before the tensor.
    """

    tensor: torch.Tensor
    offset: int
    before: bool

    @property
    def place(self) -> str:
        """The written byte, for a message."""
        if self.before:
            return f"writes byte {-self.offset} before its first element"
        return f"writes byte {self.offset + 1} after its last element"


class GuardBands(TorchDispatchMode):
    """Context manager: new tensors lie between guard bands, uninitialised ones hold one value.

    Covers tensors that Python code or autograd allocates with ``torch.empty``, ``torch.zeros``,
    ``torch.full`` and similar functions. Does not cover allocations inside a library's own
    operator, unless its kernel is a Python function, nor allocations of compiled code.
    Uninitialised integer tensors hold the guard's byte. Tensors without elements are not changed.
    """

    # Keep a subject's torch.compile and custom operators, so that the code under test is the code
    # that its users run.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the mode does not disable compiled code."""
        return True

    def __init__(self, fill: float = math.nan) -> None:
        """Start without allocations.

        Args:
            fill: Value of uninitialised floating-point and complex numbers.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._fill = fill
        self._allocations: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of the base class
        """Replace an allocation; dispatch everything else unchanged."""
        if backend := _python_kernel(func, args):
            # Modes are inactive below the dispatcher: enable this one inside the Python kernel.
            with self:
                return func.redispatch(backend, *args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if func not in (*_UNINITIALISED, *_OF_ONE_VALUE):
            return made
        if made.layout is not torch.strided or made.is_meta or not made.numel():
            return made
        if _is_taken_for_a_storage():
            return made
        return self._guarded(made, initialised=func in _OF_ONE_VALUE)

    def _guarded(self, like: torch.Tensor, *, initialised: bool) -> torch.Tensor:
        """Return a copy of ``like`` between guard bands, with a value for uninitialised ones."""
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
            own.fill_(self._fill)
        self._allocations.append((tensor, band))
        return tensor

    def overruns(self) -> Sequence[Overrun]:
        """Return the guard bands that were written to, in the order of allocation."""
        ends: dict[torch.device, list[torch.Tensor]] = {}
        for _, band in self._allocations:
            ends.setdefault(band.device, []).extend((band[:_GUARD_BYTES], band[-_GUARD_BYTES:]))
        # Wait for a GPU once, not for each band: few runs write to one.
        if not any(bool((torch.cat(of_device) != _GUARD).any()) for of_device in ends.values()):
            return []
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
        """Number of guarded allocations."""
        return len(self._allocations)


# PyTorch wraps the method to hide it from torch.compile. The wrapper imports torch._dynamo, which
# takes 2 s and is needed only if other code has imported it.
_without_dynamo = GuardBands.__torch_dispatch__


def _dispatch(
    self: GuardBands, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:  # the signature of the base class
    """Call the method itself until torch._dynamo is imported, then PyTorch's wrapper of it."""
    method = _without_dynamo
    if "torch._dynamo" not in sys.modules:
        method = getattr(method, "__wrapped__", method)
    return method(self, func, types, args, kwargs)


GuardBands.__torch_dispatch__ = _dispatch  # type: ignore[method-assign]


def _python_kernel(func: Any, args: Sequence[Any]) -> Any:
    """Return the dispatch key under which a custom operator has a Python kernel, or None."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "prims"):
        return None
    for x in args:
        if isinstance(x, torch.Tensor):
            return _backend(func, x.device.type)
    return None


# Nodes of autograd that address a tensor of their own by offsets in its storage, and take its first
# element to be at 0. Between guard bands it is not, and they would read the gradients of a slice
# from the band (torch 2.11 to 2.13).
_BY_OFFSETS = ("CopySlices", "AsStridedBackward0")


def _is_taken_for_a_storage() -> bool:
    """Return whether one of these nodes allocates, for the gradient of a write to a slice."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().rpartition("::")[2] in _BY_OFFSETS


@lru_cache(maxsize=256)
def _backend(func: Any, device: str) -> Any:
    """Return the device's dispatch key if a Python function is registered for it, else None."""
    key = torch._C._dispatch_key_for_device(device)
    registered: Any = torch.library._impls
    name = func.name().replace("::", "/")
    if not registered & {f"{name}/{x}" for x in (key, "CompositeExplicitAutograd")}:
        return None
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
