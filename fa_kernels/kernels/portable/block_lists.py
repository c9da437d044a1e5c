"""Block maps from a ``block_mask``: the tiles in visible blocks that each tile visits."""

import triton
import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.seqlen_info import valid_lengths
from fa_kernels.kernels.common.tile_ranges import visible_tiles

__all__ = ["block_lists_kernel", "everywhere"]


@triton.jit
def everywhere(b, h, m, n, args):
    """The predicate of lists that already omit hidden tiles: it hides nothing."""
    # equivalent: Rows and keys are numbered from 0, so each half is true.
    return (m >= 0) & (n >= 0)


@kernel
def block_lists_kernel(
    lists_ptr,
    blocks_ptr,
    seqlens_here_ptr,
    seqlens_there_ptr,
    stride_head: tl.int64,
    stride_here: tl.int64,
    stride_there: tl.int64,
    H: tl.int32,
    here: tl.int32,
    there: tl.int32,
    before: tl.int32,
    after: tl.int32,
    side: tl.int32,
    BLOCK_HERE: tl.constexpr,
    BLOCK_THERE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes one tile's row of a block map: the tiles of the other sequence that it visits.

    lists: int32 (B,H,tiles here,2 + tiles there). blocks: int8, one per head (or stride_head = 0)
    and ``side`` elements of either sequence; ``side`` is a multiple of both tiles. See
    ``visible_tiles`` for the other arguments.
    """
    tiles_here = tl.cdiv(here, BLOCK_HERE)
    tiles_there = tl.cdiv(there, BLOCK_THERE)
    start = tl.program_id(0) % tiles_here * BLOCK_HERE
    bh = tl.program_id(0) // tiles_here
    seqlen_here, seqlen_there = valid_lengths(
        seqlens_here_ptr, seqlens_there_ptr, bh // H, here, there
    )
    tiles = visible_tiles(start, seqlen_here, seqlen_there, before, after, BLOCK_HERE, BLOCK_THERE)
    row_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (2 + tiles_there)
    blocks = blocks_ptr + (bh % H) * stride_head + (start // side) * stride_here
    listed = 0
    # Tiles that lengths or the window hide in part come first.
    for FULL in tl.static_range(2):
        before_these = listed
        for first in range(tiles.lo, tiles.hi, CHUNK):
            tile = first + tl.arange(0, CHUNK)
            inside = tile < tiles.hi
            is_full = (tile >= tiles.full_lo) & (tile < tiles.full_hi)
            of_kind = inside & (is_full if FULL else ~is_full)
            block = (tile * BLOCK_THERE // side).to(tl.int64)
            seen = tl.load(blocks + block * stride_there, mask=of_kind, other=0) != 0
            place = listed + tl.cumsum(seen.to(tl.int32), 0)
            # The list begins after the two counts; ``place`` is 1 for its first entry.
            tl.store(row_ptr + 1 + place, tile, mask=seen)
            listed += tl.sum(seen.to(tl.int32), 0)
        tl.store(row_ptr + FULL, listed - before_these)
