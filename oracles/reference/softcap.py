"""Softcap in float64: a score x becomes c tanh(x / c), which is never larger than c."""

from __future__ import annotations

import torch

__all__ = ["capped", "slope"]

_SMALL = 0.5  # of |x / c|, below which 1 - tanh**2 does not cancel


def capped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """c tanh(x / c), differentiable to full precision however flat it is.

    The derivative of a tanh is 1 - tanh**2, of which nothing is left where tanh is nearly 1. So
    tanh is 1 - 2 e / (1 + e) there, e = exp(-2 |x / c|), whose derivative subtracts nothing.

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
    """The derivative of ``capped``, 1 - tanh(x / c)**2, as 4 e / (1 + e)**2."""
    e = torch.exp(-2 * (x / softcap).abs())
    return 4 * e / (1 + e).square()
