"""The gradients of attention, bounded where dout and dlse are themselves inexact."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["KeyErrors", "gradient_errors"]


class KeyErrors(NamedTuple):
    """Errors of gradients: (B,H,M,D), and summed over a group (B,Hk,N,D) and (B,Hk,N,Dv)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def gradient_errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seen: torch.Tensor,
    sm_scale: float,
    off_dout: torch.Tensor,
    off_dlse: torch.Tensor,
) -> KeyErrors:
    """Returns how far dq, dk and dv move if dout and dlse move by at most given amounts.

    Exact gradients are linear in dout and dlse. With dS = P (dout.(v - out) + dlse)::

        |delta dS| <= P (off_dout.|v - out| + off_dlse)
        |delta dq| <= t |delta dS| |k|,  |delta dk| <= t |delta dS|' |q|,  |delta dv| <= P' off_dout

    Args:
        q: (B, H, M, D).
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        seen: Bool (B, H, M, N), True where a query sees a key.
        sm_scale: t, the factor on q.k, > 0.
        off_dout: (B, H, M, Dv), >= 0.
        off_dlse: (B, H, M), >= 0.

    Returns:
        Float64; 0 where nothing is visible.
    """
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    if 0 in (B, M, N):
        return KeyErrors(*(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)))
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    keys, values = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    some = seen.any(3, keepdim=True)
    scores = torch.where(seen, q @ keys.mT * sm_scale, -math.inf)
    p = torch.where(seen, torch.where(some, scores, 0.0).softmax(3), 0.0)
    apart = (values[:, :, None] - (p @ values)[:, :, :, None]).abs()
    moved = p * ((apart @ off_dout[..., None])[..., 0] + off_dlse[..., None])

    def grouped(x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = x.unflatten(1, (Hk, -1)).sum(2)
        return summed

    return KeyErrors(
        sm_scale * moved @ keys.abs(),
        grouped(sm_scale * moved.mT @ q.abs()),
        grouped(p.mT @ off_dout),
    )
