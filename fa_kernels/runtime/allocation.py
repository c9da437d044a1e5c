"""The allocator of all outputs and scratch, so that tests can add guard bands and poison them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["empty"]


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor; the kernels write every element of it."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)
