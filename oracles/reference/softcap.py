"""Softcap in float64: a score x becomes c tanh(x / c), at most c in magnitude."""

from __future__ import annotations

import torch

__all__ = ["capped", "slope"]

_SMALL = 0.5  # |x / c| below which 1 - tanh**2 does not cancel


def capped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns c tanh(x / c), differentiable to full precision even where it is flat.

    The derivative 1 - tanh**2 cancels where tanh is close to 1. There, tanh is computed as
    1 - 2 e / (1 + e) with e = exp(-2 |x / c|), whose derivative has no cancellation.

    Args:
        x: Scores, float64, any shape.
        softcap: c, > 0.
    """
    y = x / softcap
    e = torch.exp(-2 * y.abs())
    is_small = y.abs() < _SMALL
    near = torch.where(is_small, y, 0.0).tanh()
    return softcap * torch.where(is_small, near, y.sign() * (1 - 2 * e / (1 + e)))


def slope(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns the derivative of ``capped``, 1 - tanh(x / c)**2, as 4 e / (1 + e)**2."""
    e = torch.exp(-2 * (x / softcap).abs())
    return 4 * e / (1 + e).square()
