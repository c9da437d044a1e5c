"""The tiles that a pass visits, as a kernel with tiles of some size does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.passes import Pass

__all__ = [
    "Place", "any_of", "edge", "first", "full", "last", "places", "ragged", "split_of", "spread",
    "visited",
]  # fmt: skip

# Returns the pairs in some of the visited tiles, (B, H, M, N) bool, given the rows and keys of a
# tile. The flag says whether the pass of dk and dv goes over rows; other passes go over keys.
Place = Callable[[Pass, int, int, bool], torch.Tensor]


def any_of(pairs: torch.Tensor, block_m: int, block_n: int) -> torch.Tensor:
    """Return the tiles that hold one of the pairs, (B, H, tiles of rows, tiles of keys)."""
    padded = pad(pairs, (0, -pairs.shape[3] % block_n, 0, -pairs.shape[2] % block_m))
    return padded.unflatten(3, (-1, block_n)).any(4).unflatten(2, (-1, block_m)).any(3)


def spread(tiles: torch.Tensor, like: torch.Tensor, block_m: int, block_n: int) -> torch.Tensor:
    """Return the pairs of tiles, in the shape of other pairs."""
    M, N = like.shape[2:]
    of_rows = tiles.repeat_interleave(block_m, 2)[:, :, :M]
    return of_rows.repeat_interleave(block_n, 3)[..., :N]


def visited(p: Pass, block_m: int, block_n: int) -> torch.Tensor:
    """Return the pairs in tiles that hold a visible one."""
    return spread(any_of(p.seen, block_m, block_n), p.seen, block_m, block_n)


def full(p: Pass, block_m: int, block_n: int, over_rows: bool) -> torch.Tensor:
    """Return the pairs in tiles that need no mask: they hold neither hidden pairs nor an end."""
    rows, keys = p.case.lengths()
    m = torch.arange(p.seen.shape[2], device=p.seen.device).view(-1, 1)
    n = torch.arange(p.seen.shape[3], device=p.seen.device)
    # The tile's own padding is no reason for a mask.
    own = (n < keys) if over_rows and p.name == "dkdv" else (m < rows)
    hidden = ~p.seen & own
    if over_rows and p.name == "dkdv":
        hidden = pad(hidden, (0, 0, 0, -hidden.shape[2] % block_m), value=True)
    else:
        hidden = pad(hidden, (0, -hidden.shape[3] % block_n), value=True)
    needs = spread(any_of(hidden, block_m, block_n), p.seen, block_m, block_n)
    return visited(p, block_m, block_n) & ~needs


def edge(p: Pass, block_m: int, block_n: int, over_rows: bool) -> torch.Tensor:
    """Return the pairs in visited tiles that need a mask."""
    return visited(p, block_m, block_n) & ~full(p, block_m, block_n, over_rows)


def first(p: Pass, block_m: int, block_n: int, over_rows: bool) -> torch.Tensor:
    """Return the pairs in the first visited tile of each tile of the other axis."""
    tiles = any_of(p.seen, block_m, block_n)
    axis = 2 if over_rows and p.name == "dkdv" else 3
    return spread(tiles & (tiles.cumsum(axis) == 1), p.seen, block_m, block_n)


def last(p: Pass, block_m: int, block_n: int, over_rows: bool) -> torch.Tensor:
    """Return the pairs in the last visited tile of each tile of the other axis."""
    tiles = any_of(p.seen, block_m, block_n)
    axis = 2 if over_rows and p.name == "dkdv" else 3
    after = tiles.flip(axis).cumsum(axis).flip(axis)
    return spread(tiles & (after == 1), p.seen, block_m, block_n)


def ragged(p: Pass, block_m: int, block_n: int, over_rows: bool) -> torch.Tensor:
    """Return the pairs in the last visited tile, where no visible pair reaches its end."""
    if over_rows and p.name == "dkdv":
        at_end = any_of(p.seen[:, :, block_m - 1 :: block_m], 1, block_n)
    else:
        at_end = any_of(p.seen[..., block_n - 1 :: block_n], block_m, 1)
    tiles = any_of(p.seen, block_m, block_n)
    at_end = pad(at_end, (0, tiles.shape[3] - at_end.shape[3], 0, tiles.shape[2] - at_end.shape[2]))
    reached = spread(at_end, p.seen, block_m, block_n)
    return last(p, block_m, block_n, over_rows) & ~reached


def places(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each key tile among those of its query tile, and their number."""
    return tiles.cumsum(3) - 1, tiles.sum(3, keepdim=True)


def split_of(p: Pass, tiles: torch.Tensor) -> torch.Tensor:
    """Return the split that visits each key tile, if the first ones take one more where needed."""
    place, count = places(tiles)
    each, more = count // p.case.splits, count % p.case.splits
    of_long = place // (each + 1)
    return torch.where(of_long < more, of_long, (place - more) // each.clamp(min=1))
