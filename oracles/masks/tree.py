"""Tree attention for speculative decoding: draft tokens see the context and their ancestors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["Tree"]


@jit
def _native(b, h, m, n, args):
    """args: (ancestors (T, T), T, offsets (B,), seqlens_k (B,))."""
    size = args[1]
    p = m + tl.load(args[2] + b)
    first = tl.load(args[3] + b) - size
    row, column = p - first, n - first
    at = tl.maximum(row, 0) * size + tl.maximum(column, 0)
    in_tree = tl.load(args[0] + at) != 0
    return ((column < 0) & (n <= p)) | ((column >= 0) & (row >= 0) & in_tree)


@dataclass(frozen=True, kw_only=True)
class Tree(Mask, uniform=True):
    """The last keys are the nodes of a tree; a node sees itself, its ancestors and the context.

    Rows before the tree are causal.

    Args:
        parents: The index of each node's parent, which comes before the node, or -1 for a root.

    Raises:
        ValueError: A parent does not come before its child.

    Source: Miao et al. 2023 (arXiv:2305.09781), section 4.2.
    """

    parents: tuple[int, ...] = (-1,)

    def __post_init__(self):
        super().__post_init__()
        if not self.parents or any(not -1 <= x < node for node, x in enumerate(self.parents)):
            raise ValueError(f"parents is {self.parents}; needs an earlier node's index, or -1")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether n is in the context of m, or m itself or an ancestor."""
        p = torch.as_tensor(self.position(b, m, M=M, N=N))
        size = len(self.parents)
        keys = self._seqlens_k(b, N)
        row, column = p - (keys - size), torch.as_tensor(n) - (keys - size)
        inside = self._ancestors().to(column.device)[row.clamp(min=0), column.clamp(min=0)]
        before = (column < 0) & (torch.as_tensor(n) <= p)
        return before | ((column >= 0) & (row >= 0) & inside)

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        keys = torch.tensor(self.lengths(B, M, N)[1], dtype=torch.int32, device=device)
        table = self._ancestors().to(torch.int8).to(device)
        return _native, (table, len(self.parents), self.offsets(B, M, N, device), keys)

    def _seqlens_k(self, b, N):
        """Returns the valid keys of a batch entry, or of each entry in a tensor."""
        if self.seqlens_k is None:
            return N
        return torch.tensor(self.seqlens_k, device=torch.as_tensor(b).device)[b]

    def _ancestors(self):
        """Returns bool (T, T), True at [i, j] if j is i or an ancestor of i."""
        found = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found

    @classmethod
    def draw(cls, rng, B, H, M, N):
        """Draws up to 24 nodes; the parent of each is an earlier node or none."""
        return cls(parents=tuple(rng.randrange(-1, node) for node in range(rng.randrange(1, 25))))
