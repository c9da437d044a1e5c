"""The sizes of a call, and how many programs its tiles take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa_kernels.runtime.launch_cache import cdiv
from fa_kernels.validation.arguments import Arguments

__all__ = ["ROW_PADDING", "Sizes", "Tiles"]

# A multiple of every block_m.
ROW_PADDING = 256


class Tiles(NamedTuple):
    """Tiles of a side of a call: those of a head, entries as in ``Grid``, those of all heads."""

    of_head: int
    entries: int
    number: int

    def in_kernels(self) -> dict[str, int]:
        """By the names of the kernels' parameters."""
        return {"tiles_of_head": self.of_head, "entries": self.entries}


class Sizes(NamedTuple):
    """Of a call: sequences and heads, the longest sequences, the rows of the tensors, head_dims.

    ``ends``: of packed sequences, whose tiles may stand one behind the other: the rows and the keys
    that the last one ends with, at most.
    """

    B: int
    H: int
    Hk: int
    M: int
    N: int
    total_q: int
    total_k: int
    D: int
    Dv: int
    ends: tuple[int, int] | None

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Arguments) -> Sizes:
        """Of packed sequences B, M and N are what the tensors' shapes do not show."""
        B, H, total_q, D = q.shape
        _, Hk, total_k, Dv = v.shape
        M, N = total_q, total_k
        if arguments.longest is not None:
            B = len(arguments.seqlens_q) - 1
            M, N = arguments.longest
        # A map of blocks has as many tiles of each.
        ends = arguments.ends if arguments.predicate is None else None
        return cls(B, H, Hk, M, N, total_q, total_k, D, Dv, ends)

    def in_kernels(self) -> dict[str, int]:
        """By the names of the kernels' parameters."""
        return {
            "H": self.H, "G": self.H // self.Hk, "M": self.M, "N": self.N,
            "total_q": self.total_q, "total_k": self.total_k, "D": self.D, "Dv": self.Dv,
        }  # fmt: skip

    def query_tiles(self, block: int) -> Tiles:
        """Of so many rows."""
        return self._tiles(0, self.M, block, self.H)

    def key_tiles(self, block: int) -> Tiles:
        """Of so many keys."""
        return self._tiles(1, self.N, block, self.Hk)

    def _tiles(self, side: int, longest: int, block: int, heads: int) -> Tiles:
        tiles = cdiv(longest, block)
        if self.ends is not None:
            in_a_row = self.ends[side] // block + self.B
            if in_a_row < tiles * self.B:
                return Tiles(in_a_row, self.B, in_a_row * heads)
        return Tiles(tiles, 0, tiles * self.B * heads)
