"""Padded problems, asked of a call that takes packed sequences: the same rows in another order."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Packing"]


class Packing(NamedTuple):
    """Of rows (B, H, M, D): all valid ones, sequence by sequence, and padding behind the last.

    Args:
        order: (B M,) where each packed row stands in (B, M).
        back: (B M,) where each row of (B, M) stands when packed.
        offsets: B + 1 ints; rows from the last on belong to no sequence.
        shape: (B, M).
    """

    order: torch.Tensor
    back: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, int]

    @classmethod
    def of(cls, lengths: tuple[int, ...], longest: int, device: torch.device) -> Packing:
        """Of sequences of these lengths, padded to ``longest``."""
        place = torch.arange(longest)
        valid = place < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)
        order = torch.cat([kind.flatten().nonzero()[:, 0] for kind in (valid, ~valid)])
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return cls(order.to(device), order.argsort().to(device), tuple(offsets), valid.shape)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, M, D) as (B M, H, D)."""
        return x.transpose(1, 2).flatten(0, 1)[self.order]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(B M, H, ...) as (B, H, M, ...)."""
        return x[self.back].unflatten(0, self.shape).transpose(1, 2)
