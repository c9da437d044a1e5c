"""Merged attention states in float64: PyTorch, with gradients by autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["Merged", "merged"]


class Merged(NamedTuple):
    """A merge and its gradients, or one number for each of their elements, such as a bound.

    Args:
        out: (B, H, M, Dv).
        lse: (B, H, M), natural.
        douts: (P, B, H, M, Dv), the gradient with respect to outs.
        dlses: (P, B, H, M), the gradient with respect to lses.
    """

    out: torch.Tensor
    lse: torch.Tensor
    douts: torch.Tensor
    dlses: torch.Tensor


def _of_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of float64 parts, differentiable."""
    live = lses != -math.inf
    some = live.any(0)
    # Selected before every operation, so that autograd multiplies no infinity by 0.
    lses = torch.where(live, lses, 0.0)
    largest = torch.where(live, lses, -math.inf).detach()
    # Without a part, the maximum has no elements.
    largest = torch.cat((largest, torch.full_like(some, -math.inf, dtype=lses.dtype)[None])).amax(0)
    pivot = torch.where(some, largest, 0.0)
    weights = torch.where(live, (lses - pivot).exp(), 0.0)
    total = torch.where(some, weights.sum(0), 1.0)
    sums = (weights[..., None] * torch.where(live[..., None], outs, 0.0)).sum(0)
    return sums / total[..., None], torch.where(some, pivot + total.log(), -math.inf)


def merged(
    outs: torch.Tensor, lses: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
) -> Merged:
    """Merges attention states, and differentiates the loss sum(out * dout) + sum(lse * dlse).

    ``lse = log sum_p exp(lse_p)`` and ``out = sum_p exp(lse_p - lse) out_p``. A part whose lse is
    -inf saw no key: its out is not read, and its gradients are 0. A row in which no part saw a key
    has out = 0, lse = -inf and gradients of 0. A NaN or +inf among the lses of a row gives NaN.

    Args:
        outs: (P, B, H, M, Dv), any float dtype and strides.
        lses: (P, B, H, M).
        dout: (B, H, M, Dv), the gradient of the loss with respect to out; ignored in empty rows.
        dlse: (B, H, M), the gradient with respect to lse; ignored in empty rows.

    Returns:
        Everything in float64, on the device of outs.
    """
    some = (lses != -math.inf).any(0)
    leaves = [x.detach().to(torch.float64).requires_grad_() for x in (outs, lses)]
    with torch.enable_grad():
        out, lse = _of_parts(*leaves)
        losses = [
            torch.where(some[..., None], dout.to(torch.float64), 0.0),
            torch.where(some, dlse.to(torch.float64), 0.0),
        ]
        gradients = torch.autograd.grad([out, lse], leaves, losses)
    return Merged(out.detach(), lse.detach(), *gradients)
