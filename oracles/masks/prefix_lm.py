"""Prefix-LM: causal attention, where all queries also see the prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["PrefixLM"]


@jit
def _native(b, h, m, n, args):
    """args: (offsets (B,), prefix)."""
    return (n <= m + tl.load(args[0] + b)) | (n < args[1])


@dataclass(frozen=True, kw_only=True)
class PrefixLM(Mask, uniform=True):
    """A query sees the keys up to its position, and the first ``prefix`` keys::

        prefix = 2      n 0 1 2 3
                    m 0   x x . .
                      1   x x . .
                      2   x x x .
                      3   x x x x

    Source: Raffel et al. 2019 (arXiv:1910.10683), figure 4.
    """

    prefix: Annotated[int, Between(0, 80)] = 0

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether n is in the prefix or at most the position of m."""
        return (n <= self.position(b, m, M=M, N=N)) | (n < self.prefix)

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        return _native, (self.offsets(B, M, N, device), self.prefix)
