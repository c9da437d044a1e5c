"""What the kernels for Hopper share: copies by TMA, tiles in shared memory, handing sums on.

Consumers, a warpgroup each, have parts of a tile. What several read, each may clear: they write
the same, whichever comes first. Where two programs share a tile (``ranges.share_of``), a consumer
of one goes on with the sums of the other's: to the bit as if there were one.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from fa_kernels.kernels.common.addressing import whole_rows

__all__ = [
    "PROGRAMS_TOGETHER",
    "WARPGROUP_ROWS",
    "add_block",
    "add_product",
    "announce_sums",
    "async_load",
    "block_of",
    "handed_rows",
    "matrix",
    "start_scores",
    "thread_barrier",
    "wait_for_sums",
    "wide",
    "zero_rows",
]

# Of a tile: what one warpgroup multiplies at a time.
WARPGROUP_ROWS: gl.constexpr = gl.constexpr(64)
# Of the last heads: more than a GPU runs at a time, so that only short ones are left at the end.
PROGRAMS_TOGETHER: gl.constexpr = gl.constexpr(256)
# Triton has named them so since 3.7.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


# 64 x 64 numbers of a warpgroup's product, those of a thread four by four.
_IN_FOURS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256]],
        block_bases=[],
        shape=[4096],
    )
)


@triton.constexpr_function
def wide(columns):
    """The layout of 16-byte loads and stores, by one warpgroup, of rows of 16-bit numbers."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def block_of(place, h, start, PACKED: gl.constexpr):
    """Where a descriptor has a sequence's rows from ``start`` on; ``place`` as of ``sequence``."""
    if PACKED:
        found = (0, h, place + start, 0)
    else:
        found = (place, h, start, 0)
    return found


@gluon.jit
def matrix(tiles, index):
    """One of several tiles (1, 1, rows, columns) in shared memory, as rows and columns."""
    tile = tiles.index(index)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def start_scores(rows, tiles, full, i, nothing):
    """Begins the product of rows and the i-th of the key or value tiles, once that is there."""
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
    columns = matrix(tiles, i % STAGES).permute((1, 0))
    return warpgroup_mma(rows, columns, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_product(acc, left, tiles, full, i):
    """Begins to add the product with the i-th of the key or value tiles, once that is there."""
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
    return warpgroup_mma(left, matrix(tiles, i % STAGES), acc, is_async=True)


@gluon.jit
def add_block(ptr, first, D: gl.constexpr, number: gl.constexpr, block):
    """Adds a product of 64 x 64 numbers to a block of that number behind a row, a 64-bit number.

    Rows have D numbers. They do not lie there in their order, but as threads have them, so that
    each adds 16 bytes at a time, and a warp 512 that follow each other: columns two by two, then
    rows that are 8 apart, four pairs of columns, eight rows, what the next warp has, and the next
    eight columns. ``rows_of_blocks`` has them in order again.
    """
    numbers = block.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])
    numbers = gl.convert_layout(numbers, _IN_FOURS, assert_trivial=True)
    start = gl.multiple_of(ptr + (first * D + number * 4096), 16)
    places = start + gl.arange(0, 4096, _IN_FOURS)
    gl.atomic_add(places, numbers, sem="relaxed")


@gluon.jit
def handed_rows(ptr, first, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Places of sums (rows, columns) that are handed on; ``first`` row, 64-bit."""
    rows = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))
    return whole_rows(ptr, first, rows, columns, SHAPE[1])


@gluon.jit
def wait_for_sums(flag):
    """Until a consumer of a program that began earlier, and waits for none, has handed its on."""
    while gl.atomic_add(flag, 0, sem="acquire") == 0:
        pass


@gluon.jit
def announce_sums(flag):
    """Says so of what this warpgroup has stored."""
    thread_barrier()
    gl.atomic_add(flag, 1, sem="release")


@gluon.jit
def zero_rows(tile, kept, WIDE: gl.constexpr):
    """Zeros in place of the rows that are not ``kept``, before products read the tile.

    For rows whose factor is 0: 0 times what they hold may not be.
    """
    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))
    fence_async_shared()
