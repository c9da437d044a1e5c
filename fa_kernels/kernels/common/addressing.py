"""Tensors in memory, and loads and stores of their tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "PAGED",
    "PAGED_WIDE",
    "Matrix",
    "Pages",
    "Tensor",
    "head_matrix",
    "load_tile",
    "page_offsets",
    "scratch_row",
    "store_rows",
    "stored_rows",
    "table_page",
    "whole_rows",
]

# Values of ALIGNED for tiles of a cache, whose rows lie in pages. A baseline names kernels by these
# numbers. 2 is that of former kernels, and has no other meaning.
PAGED: tl.constexpr = tl.constexpr(3)
PAGED_WIDE: tl.constexpr = tl.constexpr(4)


class Tensor(NamedTuple):
    """A tensor (entries, heads, rows, columns); under VARLEN, an entry is a row."""

    ptr: Any
    stride_entry: Any
    stride_head: Any
    stride_row: Any
    stride_column: Any
    columns: Any


class Matrix(NamedTuple):
    """One head of a tensor."""

    pointer: Any
    stride_row: Any
    stride_column: Any
    columns: Any


class Pages(NamedTuple):
    """One head of a cache (pages, rows, heads, columns), as one batch entry sees it.

    ``table_ptr`` leads to the entry's row of the page table, int32. Rows are numbered through the
    entry's pages.
    """

    pointer: Any
    stride_page: Any
    stride_row: Any
    stride_column: Any
    columns: Any
    table_ptr: Any
    stride_table: Any
    page_size: Any
    num_pages: Any


@triton.jit
def page_offsets(pages, rows, inside):
    """Returns the 64-bit offsets of rows of a cache.

    The table is read where ``inside`` (shaped as ``rows``) is True. The index of a page is clamped,
    so that no wrong table leads outside of the cache.
    """
    place = rows // pages.page_size
    page = table_page(pages, place, inside).to(tl.int64)
    row = (rows - place * pages.page_size).to(tl.int64)
    return page * pages.stride_page + row * pages.stride_row


@triton.jit
def table_page(pages, place, inside):
    """Returns the pages at places of an entry's row of the table, clamped to the cache."""
    # equivalent: Lanes outside read and write no row of their page, and the page is clamped.
    page = tl.load(pages.table_ptr + place.to(tl.int64) * pages.stride_table, mask=inside, other=0)
    return tl.minimum(tl.maximum(page, 0), pages.num_pages - 1)


@triton.jit
def head_matrix(tensor, offset, h):
    """Returns the matrix of one head; offsets of heads and tiles are 64-bit."""
    pointer = (
        tensor.ptr + offset.to(tl.int64) * tensor.stride_entry + h.to(tl.int64) * tensor.stride_head
    )
    return Matrix(pointer, tensor.stride_row, tensor.stride_column, tensor.columns)


@triton.jit
def load_tile(
    matrix, start, rows, columns, inside, ALIGNED: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Loads rows ``start + rows`` of ``matrix``, with zeros past its last column.

    ``rows`` (R, 1) and ``columns`` (1, C) give the tile, (1, R) and (C, 1) its transpose. With
    CHECK_ROWS, rows that are not ``inside`` (shaped as ``rows``) are zeros and are not read.

    ALIGNED = 1 promises a unit column stride, rows on 16-byte boundaries, elements of 16 or 8 bits,
    columns of a multiple of 16 bytes, and offsets within a tile that fit 32 bits. The host checks
    this; the compiler uses it for 16-byte loads.

    If ALIGNED is PAGED or PAGED_WIDE, ``matrix`` is a ``Pages``. Its rows are checked in every
    tile. PAGED_WIDE promises what 1 does, except for offsets, which are 64-bit.
    """
    if ALIGNED == PAGED_WIDE:
        row_pointers = matrix.pointer + page_offsets(matrix, start + rows, inside)
        kept = columns < matrix.columns // 8 * 8
        places = tl.multiple_of(row_pointers, (16, 16)) + columns
        tile = tl.load(places, mask=inside & kept, other=0.0)
    elif ALIGNED == PAGED:
        offsets = page_offsets(matrix, start + rows, inside)
        pointers = matrix.pointer + (offsets + columns.to(tl.int64) * matrix.stride_column)
        tile = tl.load(pointers, mask=inside & (columns < matrix.columns), other=0.0)
    elif ALIGNED:
        # Elements of 16 bytes.
        WIDTH: tl.constexpr = 128 // matrix.pointer.dtype.element_ty.primitive_bitwidth
        stride_row = (matrix.stride_row // WIDTH).to(tl.int32) * WIDTH
        pointer = tl.multiple_of(matrix.pointer + tl.cast(start, tl.int64) * stride_row, 16)
        places = pointer + (rows * stride_row + columns)
        kept = columns < matrix.columns // WIDTH * WIDTH
        if CHECK_ROWS:
            tile = tl.load(places, mask=inside & kept, other=0.0)
        else:
            tile = tl.load(places, mask=kept, other=0.0)
    else:
        row_offsets = (start + rows).to(tl.int64) * matrix.stride_row
        pointers = matrix.pointer + (row_offsets + columns.to(tl.int64) * matrix.stride_column)
        if CHECK_ROWS:
            tile = tl.load(pointers, mask=inside & (columns < matrix.columns), other=0.0)
        else:
            tile = tl.load(pointers, mask=columns < matrix.columns, other=0.0)
    return tile


@triton.jit
def stored_rows(b, h, H, offset, length, seqlen, total, VARLEN: tl.constexpr):
    """Returns (first, end) of one head in a contiguous tensor of all heads' rows.

    ``first`` is the index of the head's row 0. Rows from ``end`` on, counted from there, belong to
    others; padding rows are the head's own.
    """
    if VARLEN:
        first, end = h.to(tl.int64) * total + offset, seqlen
    else:
        first, end = (b * H + h).to(tl.int64) * length, length
    return first, end


@triton.jit
def scratch_row(b, h, H, offset, M_padded, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Returns the index of a head's row 0 in scratch that has whole tiles for each sequence.

    M_padded is the number of scratch rows per head. Under VARLEN it covers all sequences: each
    begins at a multiple of BLOCK, far enough from the next one for any lengths.
    """
    if VARLEN:
        row = h.to(tl.int64) * M_padded + (offset + b * BLOCK) // BLOCK * BLOCK
    else:
        row = (b * H + h).to(tl.int64) * M_padded
    return row


@triton.jit
def whole_rows(ptr, first, rows, columns, D):
    """Returns pointers to rows ``first + rows`` of D columns, with rows on 16-byte boundaries.

    The compiler then reads and writes 16 bytes at a time. ``first`` is 64-bit and must not be a
    constant: the compiler drops ``multiple_of`` on a plain kernel parameter.
    """
    pointer = tl.multiple_of(ptr + first * D, 16)
    return pointer + (rows.to(tl.int64)[:, None] * D + columns[None, :])


@triton.jit
def store_rows(ptr, first, end, rows, columns, tile, D, ALIGNED: tl.constexpr):
    """Writes ``tile``, cast to the tensor's dtype, as rows ``first + rows`` of D columns.

    Rows from ``end`` on are not written. ``first`` is 64-bit. See ``load_tile`` for ALIGNED.
    """
    tile = tile.to(ptr.dtype.element_ty)
    if ALIGNED:
        D = D // 8 * 8
        inside = (rows[:, None] < end) & (columns[None, :] < D)
        tl.store(whole_rows(ptr, first, rows, columns, D), tile, mask=inside)
    else:
        inside = (rows[:, None] < end) & (columns[None, :] < D)
        tl.store(ptr + ((first + rows)[:, None] * D + columns[None, :]), tile, mask=inside)
