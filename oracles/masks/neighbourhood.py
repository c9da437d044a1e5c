"""Neighbourhood attention on a grid: a square of keys around each query, shifted at borders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["Neighbourhood"]


@jit
def _first(place, kernel, size):
    """Returns the first index of the window around a place, along one axis."""
    return tl.minimum(tl.maximum(place - kernel // 2, 0), tl.maximum(size - kernel, 0))


@jit
def _native(b, h, m, n, args):
    """args: (offsets (B,), seqlens_k (B,), width, kernel)."""
    width, kernel = args[2], args[3]
    p = m + tl.load(args[0] + b)
    height = (tl.load(args[1] + b) + width - 1) // width
    place = tl.maximum(p, 0)
    top, left = _first(place // width, kernel, height), _first(place % width, kernel, width)
    y, x = n // width, n % width
    return (p >= 0) & (y >= top) & (y < top + kernel) & (x >= left) & (x < left + kernel)


@dataclass(frozen=True, kw_only=True)
class Neighbourhood(Mask, uniform=True):
    """Sequences are grids with ``width`` columns; a query sees ``kernel`` x ``kernel`` keys.

    At a border the square is shifted inwards to keep its size. The last grid row may be short.

    Source: Hassani et al. 2022 (arXiv:2204.07143), section 3.1.
    """

    width: Annotated[int, Between(1, 20)] = 1
    kernel: Annotated[int, Between(1, 9)] = 1

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least_one("width", "kernel")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether n lies in the square of m."""
        p, n = torch.as_tensor(self.position(b, m, M=M, N=N)), torch.as_tensor(n)
        keys = N
        if self.seqlens_k is not None:
            keys = torch.tensor(self.seqlens_k, device=n.device)[b]
        seen = p >= 0
        for own, other, size in (
            (p // self.width, n // self.width, (keys + self.width - 1) // self.width),
            (p % self.width, n % self.width, self.width),
        ):
            size = torch.as_tensor(size)
            first = torch.minimum(
                (own - self.kernel // 2).clamp(min=0), (size - self.kernel).clamp(min=0)
            )
            seen = seen & (other >= first) & (other < first + self.kernel)
        return seen

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        keys = torch.tensor(self.lengths(B, M, N)[1], dtype=torch.int32, device=device)
        return _native, (self.offsets(B, M, N, device), keys, self.width, self.kernel)
