"""The tile of a program, and the tiles of the other sequence that it visits."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_kernels.kernels.common.seqlen_info import seqlen_info, sequence, sequence_of_tile
from fa_kernels.kernels.common.tile_ranges import TileRange, visible_tiles

__all__ = [
    "BlockInfo",
    "BlockLists",
    "Grid",
    "KernelConfig",
    "key_block",
    "key_tiles",
    "listed_tiles",
    "nth_tile",
    "query_block",
    "row_block",
    "tile_count",
    "tile_index",
    "tile_of_program",
]


class KernelConfig(NamedTuple):
    """The constexpr parameters of a matrix kernel, under their names."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ACC: Any
    DOTS: Any
    ALIGNED: Any
    PREDICATE: Any
    SCORE_MODS: Any


class Grid(NamedTuple):
    """The numbering of programs: tiles vary fastest, then heads, then batch entries.

    If ``entries`` is not 0, the ``tiles_of_head`` tiles of a head belong to that many sequences;
    ``sequence_of_tile`` finds the sequence of a tile. Under a predicate, ``order_ptr`` holds the
    tiles in the order of programs.
    """

    tiles_of_head: Any
    entries: Any
    heads: Any
    order_ptr: Any


class BlockInfo(NamedTuple):
    """The tile of a program: its index, first row or key, batch entry and head."""

    index: Any
    start: Any
    b: Any
    h: Any


class BlockLists(NamedTuple):
    """Block maps (entries, heads, tiles, places), int32; strides are 64-bit."""

    ptr: Any
    stride_entry: Any
    stride_head: Any
    stride_tile: Any


@triton.jit
def tile_of_program(
    program,
    grid,
    cu_seqlens_ptr,
    total,
    BLOCK: tl.constexpr,
    LATE_FIRST: tl.constexpr,
    VARLEN: tl.constexpr,
    PREDICATE: tl.constexpr,
):
    """Returns (tile, b, h) of a program.

    LATE_FIRST reverses the tiles of a head: under causal masking, late query tiles take longest.
    ``cu_seqlens_ptr`` and ``total`` belong to the side whose tiles the grid counts, and are read
    under VARLEN.
    """
    tile = program % grid.tiles_of_head
    head = program // grid.tiles_of_head
    if LATE_FIRST:
        tile = grid.tiles_of_head - 1 - tile
    b = head // grid.heads
    if VARLEN:
        if grid.entries > 0:
            b, tile = sequence_of_tile(tile, cu_seqlens_ptr, grid.entries, total, BLOCK)
    h = head % grid.heads
    if PREDICATE is not None:
        tile = tl.load(grid.order_ptr + program)
    return tile, b, h


@triton.jit
def query_block(
    program, grid, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr, PREDICATE: tl.constexpr
):
    """Returns the ``BlockInfo`` and ``SeqlenInfo`` of a program with a query tile.

    Under VARLEN, the tile may lie past its sequence; the kernel then returns.
    """
    tile, b, h = tile_of_program(
        program, grid, batch.seqlens_q_ptr, batch.total_q, BLOCK, True, VARLEN, PREDICATE
    )
    seqlen = seqlen_info(batch, b, VARLEN)
    return BlockInfo(tile, tile * BLOCK, b, h), seqlen


@triton.jit
def key_block(
    program, grid, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr, PREDICATE: tl.constexpr
):
    """Returns the ``BlockInfo`` and ``SeqlenInfo`` of a program with a key tile."""
    tile, b, h = tile_of_program(
        program, grid, batch.seqlens_k_ptr, batch.total_k, BLOCK, False, VARLEN, PREDICATE
    )
    seqlen = seqlen_info(batch, b, VARLEN)
    return BlockInfo(tile, tile * BLOCK, b, h), seqlen


@triton.jit
def row_block(
    program, grid, cu_seqlens_ptr, length, total, BLOCK: tl.constexpr, VARLEN: tl.constexpr
):
    """Returns (block, offset, seqlen) of a program that visits rows, padding rows included."""
    tile, b, h = tile_of_program(program, grid, cu_seqlens_ptr, total, BLOCK, False, VARLEN, None)
    block = BlockInfo(tile, tile * BLOCK, b, h)
    offset, seqlen = b, length
    if VARLEN:
        offset, seqlen = sequence(cu_seqlens_ptr, b, length, total, VARLEN)
    return block, offset, seqlen


@triton.jit
def listed_tiles(lists, b, h, tile):
    """Reads a tile's row of a block map, as a range whose edge tiles all come first.

    Returns:
        (places, list_ptr): a ``TileRange`` of places in the list of indices, and a pointer to the
        list. The edge tiles are the partially visible ones.
    """
    row = b * lists.stride_entry + h * lists.stride_head + tile * lists.stride_tile
    mixed = tl.load(lists.ptr + row)
    visited = mixed + tl.load(lists.ptr + row + 1)
    return TileRange(0, mixed, visited, visited), lists.ptr + row + 2


@triton.jit
def key_tiles(block, mask, lists, CONFIG: tl.constexpr):
    """Returns (tiles, list_ptr): the key tiles that a query tile visits, as a ``TileRange``.

    Under a predicate, the range counts places in the list at ``list_ptr``.
    """
    if CONFIG.PREDICATE is None:
        tiles = visible_tiles(
            block.start, mask.seqlen_q, mask.seqlen_k, mask.window_left, mask.window_right,
            CONFIG.BLOCK_M, CONFIG.BLOCK_N,
        )  # fmt: skip
        list_ptr = lists.ptr
    else:
        tiles, list_ptr = listed_tiles(lists, block.b, block.h, block.index)
    return tiles, list_ptr


@triton.jit
def tile_count(tiles, edges):
    """Returns the number of edge tiles of a ``TileRange`` if ``edges``, else of full tiles."""
    count = tiles.full_hi - tiles.full_lo
    if edges:
        count = tiles.hi - tiles.lo - count
    return count


@triton.jit
def nth_tile(i, tiles, edges):
    """Returns the i-th edge tile if ``edges``, else the i-th full one; edges lie on both sides."""
    tile = tiles.full_lo + i
    if edges:
        tile = tiles.lo + i
        tile = tl.where(tile >= tiles.full_lo, tile + (tiles.full_hi - tiles.full_lo), tile)
    return tile


@triton.jit
def tile_index(place, list_ptr, PREDICATE: tl.constexpr):
    """Returns the index of the tile at a place; under a predicate, it is read from the list."""
    if PREDICATE is not None:
        place = tl.load(list_ptr + place)
    return place
