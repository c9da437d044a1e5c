"""Faults of the tiles of keys that are visited."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.masks import axes, sees
from fa_verify.diagnosis.named.named import Change, Named
from fa_verify.diagnosis.named.passes import Pass

__all__ = ["TILES"]


def _keys_kept(kept: Callable[[Pass, int, int], torch.Tensor]) -> Change:
    """Return a change that leaves keys out."""
    return lambda p, block_m, block_n: sees(p, p.seen & kept(p, block_m, block_n))


def _tail(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
    """Return whether a key lies in a ragged last tile."""
    _, n, _, keys = axes(p)
    return n >= keys // block_n * block_n


def _last_tile(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
    _, n, _, keys = axes(p)
    return n >= (keys - 1) // block_n * block_n


def _first_tile(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
    _, n, _, _ = axes(p)
    return (n < block_n).expand(p.seen.shape)


def _diagonal_stage(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
    m, n, rows, keys = axes(p)
    if p.case.problem.mask.right != 0:
        return torch.ones_like(p.seen)
    aligned = m // block_m * block_m + keys - rows + block_m
    return n < aligned // block_n * block_n


def _of_query_tile(p: Pass, block_m: int) -> torch.Tensor:
    """Return the keys that a row of the same query tile sees, (B, H, M, N)."""
    M = p.seen.shape[2]
    seen = pad(p.seen, (0, 0, 0, -M % block_m)).unflatten(2, (-1, block_m)).any(3)
    return seen.repeat_interleave(block_m, 2)[:, :, :M]


def _end_tile(last: bool) -> Callable[[Pass, int, int], torch.Tensor]:
    """Return the keys outside of the last (or first) visible tile of each query tile."""

    def kept(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
        _, n, _, _ = axes(p)
        there = _of_query_tile(p, block_m)
        tile = n // block_n
        if last:
            end = torch.where(there, tile, -1).amax(3, keepdim=True)
            return tile < end
        end = torch.where(there, tile, n.numel()).amin(3, keepdim=True)
        return tile > end

    return kept


def _overwritten(name: str, last: bool) -> Change:
    """Return a change after which dq holds the sum over one tile of keys alone."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        beyond = _end_tile(last)(p, block_m, block_n) & p.seen
        p.only[name] = ~beyond
        return bool(beyond.any())

    return change


def _twice(where: Callable[[Pass, int, int], torch.Tensor]) -> Change:
    """Return a change that adds some keys twice."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        again = where(p, block_m, block_n) & p.seen
        p.count = 1.0 + again.double()
        return bool(again.any())

    return change


TILES: tuple[Named, ...] = (
    Named("diagonal stage", "the tiles of keys ended where the query tile does",
          (_keys_kept(_diagonal_stage),), tiles="mn",
          recorded=("the diagonal stage ends",)),
    Named("tail left out", "the ragged last key tile were left out",
          (_keys_kept(lambda p, m, n: ~_tail(p, m, n)),), tiles="n"),
    Named("tail twice", "the ragged last key tile were counted twice",
          (_twice(_tail),), tiles="n"),
    Named("last tile twice", "the last key tile were counted twice", (_twice(_last_tile),),
          tiles="n"),
    Named("first tile twice", "the first key tile were counted twice", (_twice(_first_tile),),
          tiles="n"),
    Named("first tile left out", "the first key tile were left out",
          (_keys_kept(lambda p, m, n: ~_first_tile(p, m, n)), _keys_kept(_end_tile(False))),
          tiles="mn"),
    Named("dq overwritten", "the last key tile overwrote dq", (_overwritten("dq", True),), ("dq",),
          "mn", ("the last key tile overwrites dq",)),
    Named("last tile left out", "the last visible key tile of each query tile were left out",
          (_keys_kept(_end_tile(True)),), tiles="mn"),
)  # fmt: skip
