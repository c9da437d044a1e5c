"""A dilated sliding window: every ``step``-th key before a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["Dilated"]


@jit
def _native(b, h, m, n, args):
    """args: (offsets (B,), width, step)."""
    distance = m + tl.load(args[0] + b) - n
    inside = (distance >= 0) & (distance < args[1] * args[2])
    return inside & (tl.maximum(distance, 0) % args[2] == 0)


@dataclass(frozen=True, kw_only=True)
class Dilated(Mask, uniform=True):
    """A query's position and every ``step``-th key before it, ``width`` keys in all::

        width = 3, step = 2     n 0 1 2 3 4 5
                            m 5   . x . x . x

    Source: Beltagy, Peters, Cohan 2020 (arXiv:2004.05150), section 3.1.
    """

    width: Annotated[int, Between(1, 40)] = 1
    step: Annotated[int, Between(1, 9)] = 1

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least_one("width", "step")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether n is one of the ``width`` keys."""
        distance = self.position(b, m, M=M, N=N) - n
        inside = (distance >= 0) & (distance < self.width * self.step)
        return inside & (distance % self.step == 0)

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        return _native, (self.offsets(B, M, N, device), self.width, self.step)
