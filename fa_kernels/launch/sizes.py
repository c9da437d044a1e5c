"""The sizes of a call, and the number of its tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa_kernels.runtime.launch_cache import cdiv
from fa_kernels.validation.arguments import Arguments

__all__ = ["ROW_PADDING", "Sizes", "Tiles"]

# A multiple of every block_m.
ROW_PADDING = 256


class Tiles(NamedTuple):
    """The query or key tiles of a call.

    Args:
        of_head: Tiles of a head.
        entries: As in ``Grid``.
        number: Tiles of all heads and batch entries.
    """

    of_head: int
    entries: int
    number: int

    def in_kernels(self) -> dict[str, int]:
        """Returns the tile counts by the names of the kernels' parameters."""
        return {"tiles_of_head": self.of_head, "entries": self.entries}


class Sizes(NamedTuple):
    """The sizes of a call: sequences, heads, longest sequences, rows of the tensors, head_dims.

    In a varlen call without a predicate, tiles of all sequences may be numbered consecutively.
    ``ends`` is then an upper bound on the (rows, keys) at which the last sequence ends; else None.
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
        """Returns the sizes of a call; in a varlen call, B, M and N differ from the shapes."""
        B, H, total_q, D = q.shape
        _, Hk, total_k, Dv = v.shape
        M, N = total_q, total_k
        if arguments.longest is not None:
            B = len(arguments.seqlens_q) - 1
            M, N = arguments.longest
        # Block maps have the same number of tiles for every sequence.
        ends = arguments.ends if arguments.predicate is None else None
        return cls(B, H, Hk, M, N, total_q, total_k, D, Dv, ends)

    def in_kernels(self) -> dict[str, int]:
        """Returns the sizes by the names of the kernels' parameters."""
        return {
            "H": self.H, "G": self.H // self.Hk, "M": self.M, "N": self.N,
            "total_q": self.total_q, "total_k": self.total_k, "D": self.D, "Dv": self.Dv,
        }  # fmt: skip

    def query_tiles(self, block: int) -> Tiles:
        """Returns the query tiles of ``block`` rows each."""
        return self._tiles(0, self.M, block, self.H)

    def key_tiles(self, block: int) -> Tiles:
        """Returns the key tiles of ``block`` keys each."""
        return self._tiles(1, self.N, block, self.Hk)

    def _tiles(self, side: int, longest: int, block: int, heads: int) -> Tiles:
        tiles = cdiv(longest, block)
        if self.ends is not None:
            in_a_row = self.ends[side] // block + self.B
            if in_a_row < tiles * self.B:
                return Tiles(in_a_row, self.B, in_a_row * heads)
        return Tiles(tiles, 0, tiles * self.B * heads)
