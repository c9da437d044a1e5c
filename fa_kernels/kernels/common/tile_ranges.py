"""Integer arithmetic of the schedule: tiles to visit, tiles that need a mask, tiles of programs.

The functions use integers, ``min`` and ``max`` alone. Tests run their Python source (``.fn``) and
compare it with a dense mask for every small size; the kernels compile the same source. ``//``
floors in Python and truncates in a kernel, so every dividend below is clamped to >= 0 first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["TileRange", "is_edge", "share_of", "split_range", "tile_of_head", "visible_tiles"]


class TileRange(NamedTuple):
    """Tiles [lo, hi) of the other sequence; tiles in [full_lo, full_hi) need no mask."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


@triton.jit
def visible_tiles(
    start,
    seqlen_here,
    seqlen_there,
    before,
    after,
    BLOCK_HERE,
    BLOCK_THERE: tl.constexpr,
):
    """Returns the tiles of the other sequence that share a visible pair with the tile at ``start``.

    Element i of this sequence has position p = i + seqlen_there - seqlen_here in the other one, and
    pairs with its elements j with p - before <= j <= p + after. Arguments for (queries, keys,
    window_left, window_right) give the key tiles of a query tile. Arguments for (keys, queries,
    window_right, window_left) give the query tiles of a key tile::

        lo       full_lo        full_hi      hi
         |  edge    |  wholly      |   edge   |
         |  masked  |  visible     |  masked  |

    Args:
        start: First element of this tile.
        seqlen_here: Valid length of this sequence.
        seqlen_there: Valid length of the other sequence.
        before: Visible elements before the position, >= 0; the sum of both lengths if unbounded.
        after: Visible elements after the position, >= 0; the sum of both lengths if unbounded.
        BLOCK_HERE: Elements of a tile of this sequence.
        BLOCK_THERE: Elements of a tile of the other sequence.

    Returns:
        A ``TileRange`` with lo <= full_lo <= full_hi <= hi. The tiles in [lo, hi) are the tiles
        with a visible pair. In [full_lo, full_hi), every pair with a valid element of this tile is
        visible.
    """
    first = start + seqlen_there - seqlen_here
    last = min(start + BLOCK_HERE, seqlen_here) - 1 + seqlen_there - seqlen_here
    # Half-open intervals of the elements that any, and that all, elements of this tile pair with.
    any_lo = max(first - before, 0)
    any_hi = min(max(last + after + 1, 0), seqlen_there)
    all_lo = max(last - before, 0)
    all_hi = min(max(first + after + 1, 0), seqlen_there)
    if start >= seqlen_here:
        any_hi = 0
    lo = any_lo // BLOCK_THERE
    hi = max((any_hi + BLOCK_THERE - 1) // BLOCK_THERE, lo)
    full_lo = min(max((all_lo + BLOCK_THERE - 1) // BLOCK_THERE, lo), hi)
    full_hi = min(max(all_hi // BLOCK_THERE, full_lo), hi)
    return TileRange(lo, full_lo, full_hi, hi)


@triton.jit
def is_edge(tile, tiles):
    """Returns whether a tile of a ``TileRange`` needs the mask."""
    return (tile < tiles.full_lo) | (tile >= tiles.full_hi)


@triton.jit
def split_range(tiles, split, num_splits):
    """Returns the tiles of one of ``num_splits`` programs.

    Splits are consecutive and as equal as possible: the first ones have one tile more if the tiles
    do not divide evenly. With fewer tiles than splits, the last ones are empty.

    Args:
        tiles: The ``TileRange`` of all splits, of tiles or of places in a list.
        split: The index of the split, in [0, num_splits).
        num_splits: Number of splits, >= 1.

    Returns:
        The ``TileRange`` of the split.
    """
    each = (tiles.hi - tiles.lo) // num_splits
    more = (tiles.hi - tiles.lo) % num_splits
    first = tiles.lo + split * each + min(split, more)
    last = first + each
    if split < more:
        last += 1
    full_lo = min(max(tiles.full_lo, first), last)
    full_hi = min(max(tiles.full_hi, first), last)
    return TileRange(first, full_lo, full_hi, last)


@triton.jit
def tile_of_head(program, tiles, heads, together):
    """Returns the tile and head of a program, for ``tiles`` tiles of each of ``heads`` heads.

    Programs that run together should read the same keys, so tiles vary faster than heads. The last
    heads, with ``together`` programs or more, are an exception: their programs take tile 0 of each
    head, then tile 1 of each, and so on. If earlier tiles take longer, the programs that begin last
    are then short.

    Returns:
        (tile, head).
    """
    last = min((together + tiles - 1) // tiles, heads)
    place = program - (heads - last) * tiles
    tile, head = program % tiles, program // tiles
    if place >= 0:
        tile, head = place // last, heads - last + place % last
    return tile, head


@triton.jit
def share_of(program, tiles, each, shares):
    """Returns the tile of a program and its shares of the tile, in a stream-K partition.

    Each of ``tiles`` tiles has one program, but the first ``each * (shares - 1)`` tiles have two.
    The first ``each`` of these are cut after one of ``shares`` shares, the next ``each`` after two,
    and so on. Programs for the parts before a cut come first. Programs for the parts after a cut
    come last, longest first.

    Returns:
        (tile, begin, end): the program has the shares [begin, end) of [0, shares).
    """
    tile, begin, end = program, 0, shares
    if program >= tiles:
        tile = program - tiles
        begin = tile // each + 1
    elif program < each * (shares - 1):
        end = tile // each + 1
    return tile, begin, end
