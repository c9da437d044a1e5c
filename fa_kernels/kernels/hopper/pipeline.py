"""Helpers of the kernels for Hopper: pipelines of tiles, products, the partition of work.

A program has one producer warp and several consumer warpgroups. The producer copies tiles into
shared memory by TMA; each consumer owns WARPGROUP_ROWS rows of a tile. Several consumers may clear
the same rows of a shared tile: they write equal values, so their order does not matter.

Two programs may share a tile (stream-K). The second one continues from the partial sums of the
first, so the result has the bits of a tile that is not shared.
"""

from typing import Any, NamedTuple

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
from fa_kernels.kernels.common.mask import pairs_seen
from fa_kernels.kernels.common.tile_ranges import share_of, tile_of_head, visible_tiles

__all__ = [
    "PROGRAMS_TOGETHER",
    "WARPGROUP_ROWS",
    "PartialSums",
    "Partition",
    "Pipeline",
    "Steps",
    "VisiblePairs",
    "accumulator_layout",
    "add_block",
    "add_product",
    "async_load",
    "block_at",
    "key_tiles",
    "load_stage",
    "make_barriers",
    "make_tiles",
    "mask_of",
    "matrix",
    "operand_layout",
    "partial_rows",
    "partition_of",
    "phase_of",
    "query_tiles",
    "release",
    "signal",
    "stage_of",
    "start_scores",
    "steps_of",
    "sums_of_consumer",
    "thread_barrier",
    "tile_at",
    "visible",
    "wait_for_signal",
    "wait_free",
    "wait_full",
    "wide",
    "zero_rows",
]

# Rows of a tile that one warpgroup multiplies at a time.
WARPGROUP_ROWS: gl.constexpr = gl.constexpr(64)
# ``together`` of ``tile_of_head`` in the backward: more programs than a GPU runs at a time, so that
# short ones end last.
PROGRAMS_TOGETHER: gl.constexpr = gl.constexpr(256)
# Triton 3.7 renamed these two functions.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


# A warpgroup's product of 64 x 64 numbers, flattened so that a thread holds four consecutive ones.
_IN_FOURS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256]],
        block_bases=[],
        shape=[4096],
    )
)


# In a kernel, a NamedTuple becomes Triton's own tuple type with these fields. The type has
# attributes ``values`` and ``type``, so no field can have these names.


class VisiblePairs(NamedTuple):
    """The visible pairs of one batch entry: valid lengths and the window."""

    seqlen_q: Any
    seqlen_k: Any
    window_left: Any
    window_right: Any


class Partition(NamedTuple):
    """The work of a program: parts [begin, end) of ``shares`` equal parts of a tile's steps.

    ``index`` counts the tiles of all heads; ``block`` is the tile within its head.
    """

    index: Any
    block: Any
    head: Any
    begin: Any
    end: Any
    shares: Any


class Steps(NamedTuple):
    """The steps [begin, end) of a program, of the ``total`` of its tile."""

    begin: Any
    end: Any
    total: Any


class PartialSums(NamedTuple):
    """The partial sums that programs with a shared tile exchange: rows of float32, and a signal.

    ``first_row`` is 64-bit. The signal is an int32, which is 0 until the sums are stored.
    """

    ptr: Any
    first_row: Any
    signal_ptr: Any


class Pipeline(NamedTuple):
    """A ring of stages in shared memory. The i-th tile goes through stage i % STAGES.

    ``tiles`` has one tile (1, 1, rows, columns) per stage. ``full`` and ``free`` have one barrier
    per stage: ``full`` ends a phase when the tile has arrived, ``free`` when all consumers have
    released it.
    """

    tiles: Any
    full: Any
    free: Any


@triton.constexpr_function
def wide(columns):
    """The layout of 16-byte loads and stores, by one warpgroup, of rows of 16-bit numbers."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@triton.constexpr_function
def accumulator_layout(columns):
    """The layout of a warpgroup's product of 64 rows and ``columns`` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@triton.constexpr_function
def operand_layout(columns):
    """The layout of a left operand in registers, for a product with ``columns`` columns."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]), 2)


@gluon.jit
def mask_of(info, window_left, window_right):
    """The ``VisiblePairs`` of a batch entry."""
    return VisiblePairs(info.seqlen_q, info.seqlen_k, window_left, window_right)


@gluon.jit
def key_tiles(start_m, mask, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The ``TileRange`` of key tiles that a query tile visits."""
    return visible_tiles(
        start_m, mask.seqlen_q, mask.seqlen_k, mask.window_left, mask.window_right, BLOCK_M, BLOCK_N
    )


@gluon.jit
def query_tiles(start_n, mask, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """The ``TileRange`` of query tiles that a key tile visits."""
    return visible_tiles(
        start_n, mask.seqlen_k, mask.seqlen_q, mask.window_right, mask.window_left, BLOCK_N, BLOCK_M
    )


@gluon.jit
def visible(offs_m, offs_n, mask):
    """Returns True where queries (rows) see keys (columns)."""
    return pairs_seen(
        offs_m, offs_n, mask.seqlen_q, mask.seqlen_k, mask.window_left, mask.window_right
    )


@gluon.jit
def partition_of(program, programs, tiles_of_head, each, shares):
    """The ``Partition`` of one of ``programs`` programs; ``share_of`` divides the tiles."""
    tiles = programs - each * (shares - 1)
    index, begin, end = share_of(program, tiles, each, shares)
    heads = tiles // tiles_of_head
    block, head = tile_of_head(index, tiles_of_head, heads, PROGRAMS_TOGETHER)
    return Partition(index, block, head, begin, end, shares)


@gluon.jit
def steps_of(partition, total):
    """The ``Steps`` of a program whose tile has ``total`` steps."""
    begin = total * partition.begin // partition.shares
    end = total * partition.end // partition.shares
    return Steps(begin, end, total)


@gluon.jit
def sums_of_consumer(sums, consumer: gl.constexpr, ROWS: gl.constexpr):
    """The ``PartialSums`` of one consumer of a tile, ROWS rows each."""
    signal_ptr = sums.signal_ptr + consumer
    return PartialSums(sums.ptr, sums.first_row + consumer * ROWS, signal_ptr)


@gluon.jit
def partial_rows(sums, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to partial sums (rows, columns)."""
    rows = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))
    return whole_rows(sums.ptr, sums.first_row, rows, columns, SHAPE[1])


@gluon.jit
def wait_for_signal(sums):
    """Waits until the other program's consumer has stored its partial sums.

    The other program began earlier and waits for none, so the loop terminates.
    """
    while gl.atomic_add(sums.signal_ptr, 0, sem="acquire") == 0:
        pass


@gluon.jit
def signal(sums):
    """Publishes the partial sums that this warpgroup has stored."""
    thread_barrier()
    gl.atomic_add(sums.signal_ptr, 1, sem="release")


@gluon.jit
def block_at(offset, h, start, VARLEN: gl.constexpr):
    """The coordinates in a descriptor of row ``start`` of a sequence.

    ``offset`` is a field of ``SeqlenInfo``.
    """
    if VARLEN:
        coordinates = (0, h, offset + start, 0)
    else:
        coordinates = (offset, h, start, 0)
    return coordinates


@gluon.jit
def make_tiles(desc, NUMBER: gl.constexpr):
    """Allocates shared memory for NUMBER blocks of a descriptor."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    return gl.allocate_shared_memory(desc.dtype, [NUMBER, 1, 1, ROWS, COLUMNS], desc.layout)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr):
    """Allocates NUMBER barriers, uninitialised."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def matrix(tiles, index):
    """One of several tiles (1, 1, rows, columns) in shared memory, as rows and columns."""
    tile = tiles.index(index)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def stage_of(pipeline, i):
    """The stage of the i-th tile."""
    return i % pipeline.tiles.shape[0]


@gluon.jit
def phase_of(pipeline, i):
    """The parity of the phase of ``full`` that the i-th tile ends."""
    return i // pipeline.tiles.shape[0] & 1


@gluon.jit
def tile_at(pipeline, i):
    """The i-th tile, as rows and columns."""
    return matrix(pipeline.tiles, stage_of(pipeline, i))


@gluon.jit
def wait_full(pipeline, i):
    """Waits until the i-th tile has arrived."""
    mbarrier.wait(pipeline.full.index(stage_of(pipeline, i)), phase_of(pipeline, i))


@gluon.jit
def wait_free(pipeline, i):
    """Waits until the i-th tile's stage is free.

    The first wait on a stage passes: the phase before the first counts as complete.
    """
    mbarrier.wait(pipeline.free.index(stage_of(pipeline, i)), phase_of(pipeline, i) ^ 1)


@gluon.jit
def release(pipeline, i):
    """Releases the i-th tile's stage on behalf of one consumer."""
    mbarrier.arrive(pipeline.free.index(stage_of(pipeline, i)), count=1)


@gluon.jit
def load_stage(pipeline, i, desc, coordinates):
    """Begins the copy of the i-th tile."""
    full = pipeline.full.index(stage_of(pipeline, i))
    mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, coordinates, full, pipeline.tiles.index(stage_of(pipeline, i)))


@gluon.jit
def start_scores(rows, pipeline, i, zeros):
    """Waits for the i-th key or value tile, then starts the product of rows and its transpose."""
    wait_full(pipeline, i)
    columns = tile_at(pipeline, i).permute((1, 0))
    return warpgroup_mma(rows, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(acc, left, pipeline, i):
    """Waits for the i-th key or value tile, then starts to add its product with ``left`` to acc."""
    wait_full(pipeline, i)
    return warpgroup_mma(left, tile_at(pipeline, i), acc, is_async=True)


@gluon.jit
def add_block(ptr, first, D: gl.constexpr, number: gl.constexpr, block):
    """Adds a product of 64 x 64 numbers to block ``number`` of the sums from row ``first`` on.

    ``first`` is 64-bit, and rows have D numbers. A block is stored in the order of the warpgroup's
    registers: each thread adds 16 bytes at a time, and a warp 512 consecutive bytes. Its axes, from
    the innermost, are two columns, two rows that are 8 apart, four pairs of columns, eight rows,
    the warps, and eight groups of columns. ``rows_of_blocks`` restores the order of rows.
    """
    numbers = block.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])
    numbers = gl.convert_layout(numbers, _IN_FOURS, assert_trivial=True)
    start = gl.multiple_of(ptr + (first * D + number * 4096), 16)
    places = start + gl.arange(0, 4096, _IN_FOURS)
    gl.atomic_add(places, numbers, sem="relaxed")


@gluon.jit
def zero_rows(tile, kept, WIDE: gl.constexpr):
    """Clears the rows that are not ``kept``, before a product reads the tile.

    Their factor is 0, but 0 times infinity or NaN is NaN.
    """
    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))
    fence_async_shared()
