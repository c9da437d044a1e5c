"""Convert padded tensors to packed sequences and back, to test a varlen function."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Packing"]


class Packing(NamedTuple):
    """A permutation of rows: the valid rows of each sequence in turn, then all padding.

    Args:
        order: (B M,), index in the flattened (B, M) of each packed row.
        back: (B M,), index of each row of the flattened (B, M) in the packed order.
        offsets: B + 1 ints, cu_seqlens. Rows from the last offset on belong to no sequence.
        shape: (B, M).
    """

    order: torch.Tensor
    back: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, int]

    @classmethod
    def of(cls, lengths: tuple[int, ...], longest: int, device: torch.device) -> Packing:
        """Create the packing of sequences with these lengths, padded to ``longest``."""
        place = torch.arange(longest)
        valid = place < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)
        order = torch.cat([kind.flatten().nonzero()[:, 0] for kind in (valid, ~valid)])
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return cls(order.to(device), order.argsort().to(device), tuple(offsets), valid.shape)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Pack (B, H, M, D) to (B M, H, D)."""
        return x.transpose(1, 2).flatten(0, 1)[self.order]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack (B M, H, ...) to (B, H, M, ...)."""
        return x[self.back].unflatten(0, self.shape).transpose(1, 2)
