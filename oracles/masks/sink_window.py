"""A sliding window with attention sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["SinkWindow"]


@jit
def _native(b, h, m, n, args):
    """args: (offsets (B,), sinks, width)."""
    p = m + tl.load(args[0] + b)
    return (n <= p) & ((n > p - args[2]) | (n < args[1]))


@dataclass(frozen=True, kw_only=True)
class SinkWindow(Mask, uniform=True):
    """The last ``width`` keys up to a query's position, and the first ``sinks`` keys before it.

    Source: Xiao et al. 2023 (arXiv:2309.17453).
    """

    sinks: Annotated[int, Between(0, 8)] = 0
    width: Annotated[int, Between(1, 70)] = 1

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least_one("width")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether n is in the window of m, or a sink."""
        p = self.position(b, m, M=M, N=N)
        return (n <= p) & ((p - n < self.width) | (n < self.sinks))

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        return _native, (self.offsets(B, M, N, device), self.sinks, self.width)
