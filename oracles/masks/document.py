"""Documents packed into one sequence: a query sees the keys of its own document."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.triton_or_none import jit, tl

__all__ = ["Document"]


@jit
def _native(b, h, m, n, args):
    """args: (segment ids (B, N), N, offsets (B,))."""
    ids = args[0] + b * args[1]
    p = m + tl.load(args[2] + b)
    same = tl.load(ids + tl.maximum(p, 0)) == tl.load(ids + n)
    return (p >= 0) & same


@dataclass(frozen=True, kw_only=True)
class Document(Mask):
    """A query sees the keys of its document, with ``causal=True`` up to its position.

    Args:
        starts: For each batch entry, the ascending first keys of all documents but the first. Entry
            b uses ``starts[b % len(starts)]``.
    """

    starts: tuple[tuple[int, ...], ...] = ((),)

    def __post_init__(self):
        super().__post_init__()
        if not self.starts:
            raise ValueError("starts is empty; needs the starts of at least one batch entry")

    def mask_mod(self, b, h, m, n, *, M, N):
        """Whether m and n belong to the same document."""
        p = torch.as_tensor(self.position(b, m, M=M, N=N))
        ids = self._ids(1 + int(torch.as_tensor(b).max()), N).to(p.device)
        return (p >= 0) & (ids[b, p.clamp(min=0)] == ids[b, n])

    def native(self, B, H, M, N, device):
        """``mask_mod`` in Triton."""
        ids = self._ids(B, N).to(torch.int32).to(device)
        return _native, (ids, N, self.offsets(B, M, N, device))

    def _ids(self, B, N):
        """Returns segment ids (B, N): the number of later documents that begin up to a key."""
        ids = torch.zeros(B, N, dtype=torch.int64)
        for b in range(B):
            for start in self.starts[b % len(self.starts)]:
                ids[b, start:] += 1
        return ids

    @classmethod
    def draw(cls, rng, B, H, M, N):
        """Draws one to four documents per entry, causal or not."""
        starts = (sorted(rng.sample(range(1, N), min(rng.randrange(4), N - 1))) for _ in range(B))
        if N < 2:
            starts = ((),)
        return cls(starts=tuple(map(tuple, starts)) or ((),), causal=rng.random() < 0.5)
