"""The global settings of PyTorch, which a call of a kernel has to leave as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["changed_settings"]


def _set_device(device: torch.device) -> None:
    # None removes the function mode that a default device installs.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _precision() -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set by the old names and by the new ones
        return "mixed"


def _set_precision(precision: str) -> None:
    if precision != "mixed":
        torch.set_float32_matmul_precision(precision)


def _set_fill(fills: bool) -> None:
    deterministic: Any = torch.utils.deterministic  # the attribute is missing in the stubs
    deterministic.fill_uninitialized_memory = fills


def _seeds_gpu() -> bool:
    """Whether the state of a GPU's generator can be read: a capture forbids it."""
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def _state_on_gpu() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if _seeds_gpu() else None


def _set_state_on_gpu(state: torch.Tensor | None) -> None:
    if state is not None and _seeds_gpu():
        torch.cuda.set_rng_state(state)


# The settings by name, with the functions that read and restore them. The device is first: it has a
# part in the others.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the default device": (torch.get_default_device, _set_device),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the deterministic mode": (
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
    ),
    "fill_uninitialized_memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        _set_fill,
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 products": (_precision, _set_precision),
    "the state of the default generator": (torch.get_rng_state, torch.set_rng_state),
    "the state of the GPU's default generator": (_state_on_gpu, _set_state_on_gpu),
}  # fmt: skip


@contextmanager
def changed_settings() -> Iterator[list[str]]:
    """Restore the settings after the block; the list then says which the block has changed."""
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (read, restore) in _SETTINGS.items():
            was, now = before[name], read()
            if isinstance(was, torch.Tensor):
                if not torch.equal(was, now):
                    changed.append(name)
                    restore(was)
            elif was is not None and was != now:
                changed.append(f"{name} from {was} to {now}")
                restore(was)
