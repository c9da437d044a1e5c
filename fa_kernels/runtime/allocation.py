"""The one place that allocates outputs and scratch, so that tests can surround and poison them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["empty"]


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor; the kernels write every element of it."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)
