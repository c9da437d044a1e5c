"""Random blocks of 128 x 128: each head sees its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from oracles.jit import jit, tl
from oracles.mask import Between, Mask
from oracles.stream import uniform

__all__ = ["BlockSparse"]

BLOCK: int = 128


@jit
def _native(b, h, m, n, args):
    """args: (blocks (H, rows, columns), rows, columns, side of a block)."""
    at = (h * args[1] + m // args[3]) * args[2] + n // args[3]
    return tl.load(args[0] + at) != 0


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Mask):
    """Blocks of ``side`` rows and keys, visible or not as a whole, drawn for each head.

    Args:
        percent: Of all blocks that are visible, about.
        seed: Of the draw.
        side: Rows and keys of a block.
    """

    percent: Annotated[int, Between(0, 100)] = 50
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0
    side: Annotated[int, Between(BLOCK, BLOCK)] = BLOCK

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least_one("side")

    def allows(self, b, h, m, n, *, M, N):
        """The definition."""
        h = torch.as_tensor(h)
        blocks = self._blocks(1 + int(h.max()), M, N).to(h.device)
        return blocks[h, m // self.side, n // self.side]

    def native(self, B, H, M, N, device):
        """The same in Triton."""
        blocks = self._blocks(H, M, N).to(torch.int8).to(device)
        return _native, (blocks, *blocks.shape[1:], self.side)

    def _blocks(self, H, M, N):
        """Bool (H, rows of blocks, columns of blocks)."""
        shape = -(-M // self.side), -(-N // self.side)
        drawn = [uniform(self.seed, f"block-sparse/{h}", shape) for h in range(H)]
        return torch.stack(drawn) * 100 < self.percent
