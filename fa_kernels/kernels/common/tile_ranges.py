"""Which tiles a tile has to visit, and which of those need a mask: pure integer arithmetic.

Where several programs share the tiles of one, each has its part of them. And which tile a program
has, where all tiles of all heads have one each.

The functions use nothing but integers, ``min`` and ``max``, so that their Python source (``.fn``)
can be compared with a dense mask for every small size; the kernels compile the same source. ``//``
floors in Python and truncates in a kernel: every dividend below is clamped to >= 0 first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["TileRange", "share_of", "split_range", "tile_of_head", "visible_tiles"]


class TileRange(NamedTuple):
    """Tiles [lo, hi) of the other sequence; those in [full_lo, full_hi) need no mask."""

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
    BLOCK_HERE: tl.constexpr,
    BLOCK_THERE: tl.constexpr,
):
    """Tiles of the other sequence that the tile at ``start`` shares a visible pair with.

    An element i of this sequence stands at position p = i + seqlen_there - seqlen_here of the
    other one and pairs with the elements j there with p - before <= j <= p + after. Called with
    (queries, keys, window_left, window_right) it gives the key tiles of a query tile; called with
    (keys, queries, window_right, window_left) the query tiles of a key tile::

        lo       full_lo        full_hi      hi
         |  edge    |  wholly      |   edge   |
         |  masked  |  visible     |  masked  |

    Args:
        start: First element of this tile, a multiple of BLOCK_HERE.
        seqlen_here: Valid length of this sequence.
        seqlen_there: Valid length of the other sequence.
        before: Visible elements before the own position, >= 0 (unbounded: both lengths' sum).
        after: Visible elements after the own position, >= 0.
        BLOCK_HERE: Elements of a tile of this sequence.
        BLOCK_THERE: Elements of a tile of the other sequence.

    Returns:
        A ``TileRange`` with lo <= full_lo <= full_hi <= hi: every tile in [lo, hi)
        holds a visible pair, none outside does; in [full_lo, full_hi) every pair with a valid
        element of this tile is visible.
    """
    first = start + seqlen_there - seqlen_here
    last = min(start + BLOCK_HERE, seqlen_here) - 1 + seqlen_there - seqlen_here
    # Half-open interval of elements that anyone, and that everyone, in this tile pairs with.
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
def split_range(tiles, split, num_splits):
    """The tiles that one of ``num_splits`` programs visits, as even a share as there is.

    The splits follow each other. The first ones have a tile more where the tiles do not divide
    evenly, and the last ones none where there are fewer tiles than splits.

    Args:
        tiles: The ``TileRange`` of all, of tiles or of places in a list.
        split: Which split, in [0, num_splits).
        num_splits: How many, >= 1.

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
    """The tile and the head that a program has, out of ``tiles`` of each of ``heads``.

    Heads follow each other, so that those that run together read the same keys, up to the last
    ones, of ``together`` programs or more: of these tile 0 of each comes first, then tile 1 of
    each, and so on. Where earlier tiles take longer, what begins last ends early.

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
    """The tile that a program has, and its share of it, where programs share tiles.

    Each of ``tiles`` has a program of its own, but of the first ``each * (shares - 1)`` two: those
    of the first ``each`` are cut behind one of so many ``shares``, the next behind two, and so on.
    Programs of what is in front of a cut come first, those of what is behind it last, the longest
    before the others.

    Returns:
        (tile, begin, end): its shares are those in [begin, end), of [0, shares) in all.
    """
    tile, begin, end = program, 0, shares
    if program >= tiles:
        tile = program - tiles
        begin = tile // each + 1
    elif program < each * (shares - 1):
        end = tile // each + 1
    return tile, begin, end
