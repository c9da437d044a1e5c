"""Random visible blocks, 128 x 128 by default, for each head or shared by all heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl
from fa_verify.oracles.stream import uniform

__all__ = ["BlockSparse"]


@jit
def _native(b, h, m, n, args):
    """args: (blocks (H or 1, rows, columns), rows, columns, side, 0 if heads share blocks)."""
    at = (h * args[4] * args[1] + m // args[3]) * args[2] + n // args[3]
    return tl.load(args[0] + at) != 0


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Mask):
    """Blocks of ``side`` rows and keys, each visible or hidden as a whole, drawn from a seed.

    Args:
        percent: Approximate percentage of visible blocks.
        seed: Seed of the draw.
        side: Rows and keys of a block.
        per_head: Whether each head has its own blocks.
        heads: The index that each head's blocks are drawn for; None is 0, 1, ...
    """

    percent: int = 50
    seed: int = 0
    side: int = 128
    per_head: bool = True
    heads: tuple[int, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least_one("side")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether the block of (m, n) is visible."""
        h = torch.as_tensor(h)
        blocks = self.blocks(1 + int(h.max()), M, N).to(h.device)
        return blocks[h if self.per_head else 0, m // self.side, n // self.side]

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        blocks = self.blocks(H, M, N).to(torch.int8).to(device)
        return _native, (blocks, *blocks.shape[1:], self.side, int(self.per_head))

    def blocks(self, H, M, N):
        """Returns the visible blocks, bool (H or 1, block rows, block columns)."""
        shape = -(-M // self.side), -(-N // self.side)
        heads = (self.heads or range(H)) if self.per_head else (0,)
        drawn = [uniform(self.seed, f"block-sparse/{h}", shape) for h in heads]
        return torch.stack(drawn) * 100 < self.percent

    def sliced(self, entries, heads=None):
        """Slices to the same class, so that kernels that take block masks still accept it."""
        rows, keys = self._lengths_of(entries)
        if heads is not None and self.heads is not None:
            heads = tuple(self.heads[h] for h in heads)
        heads = self.heads if heads is None else heads
        return dataclasses.replace(self, heads=heads, seqlens_q=rows, seqlens_k=keys)

    @classmethod
    def draw(cls, rng, B, H, M, N):
        """Draws blocks of 16 to 128 rows, from none visible to all visible."""
        return cls(
            percent=rng.choice((0, 10, 50, 90, 100)),
            seed=rng.randrange(2**31),
            side=rng.choice((16, 32, 64, 128)),
            per_head=rng.random() < 0.5,
        )
