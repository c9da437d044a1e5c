"""Random blocks, of 128 x 128 by default: each head sees its own, or all the same."""

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
    """args: (blocks (H or 1, rows, columns), rows, columns, side of a block, 0 if of all heads)."""
    at = (h * args[4] * args[1] + m // args[3]) * args[2] + n // args[3]
    return tl.load(args[0] + at) != 0


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Mask):
    """Blocks of ``side`` rows and keys, visible or not as a whole, drawn by seed.

    Args:
        percent: Of all blocks that are visible, about.
        seed: Of the draw.
        side: Rows and keys of a block.
        per_head: Whether each head has blocks of its own.
        heads: Whose blocks the heads have, in their order; None is 0, 1, ...
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
        """The definition."""
        h = torch.as_tensor(h)
        blocks = self.blocks(1 + int(h.max()), M, N).to(h.device)
        return blocks[h if self.per_head else 0, m // self.side, n // self.side]

    def native(self, B, H, M, N, device):
        """The same in Triton."""
        blocks = self.blocks(H, M, N).to(torch.int8).to(device)
        return _native, (blocks, *blocks.shape[1:], self.side, int(self.per_head))

    def blocks(self, H, M, N):
        """Bool (H or 1, rows of blocks, columns of blocks)."""
        shape = -(-M // self.side), -(-N // self.side)
        heads = (self.heads or range(H)) if self.per_head else (0,)
        drawn = [uniform(self.seed, f"block-sparse/{h}", shape) for h in heads]
        return torch.stack(drawn) * 100 < self.percent

    def sliced(self, entries, heads=None):
        """Of the same class, so that kernels which take maps of blocks still can."""
        rows, keys = self._lengths_of(entries)
        if heads is not None and self.heads is not None:
            heads = tuple(self.heads[h] for h in heads)
        heads = self.heads if heads is None else heads
        return dataclasses.replace(self, heads=heads, seqlens_q=rows, seqlens_k=keys)

    @classmethod
    def draw(cls, rng, B, H, M, N):
        """Blocks of 16 to 128, few or many of them."""
        return cls(
            percent=rng.choice((0, 10, 50, 90, 100)),
            seed=rng.randrange(2**31),
            side=rng.choice((16, 32, 64, 128)),
            per_head=rng.random() < 0.5,
        )
