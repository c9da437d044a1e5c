"""The acts that all kernels share: addressing, loads, the element mask, the scale.

A ``matrix`` is the tuple (pointer, row stride, column stride, number of columns) of one head; a
``view`` is the tuple (seqlen_q, seqlen_k, window_left, window_right) of one batch entry.
"""

import triton
import triton.language as tl


__all__ = [
    "LN2",
    "LOG2E",
    "base2_lse",
    "element_mask",
    "head_matrix",
    "load_tile",
    "scale_from_bits",
    "store_rows",
    "valid_lengths",
]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def scale_from_bits(sm_scale_bits):
    """The softmax scale as float64.

    A Python float arrives as float32; its bits in an int64 keep every digit, which float64 inputs
    need.
    """
    return tl.cast(sm_scale_bits, tl.float64, bitcast=True)


@triton.jit
def head_matrix(
    ptr, b, h, stride_b, stride_h, stride_row, stride_column, columns, ALIGNED: tl.constexpr
):
    """The matrix of one head; offsets are 64-bit.

    ALIGNED: unit column stride, rows on 16-byte boundaries and no column to mask, which the host
    has checked; said here so that the compiler can make loads 16 bytes wide.
    """
    pointer = ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        stride_row = (stride_row // 8) * 8
    return pointer, stride_row, stride_column, columns


@triton.jit
def load_tile(matrix, rows, columns, row_end, ALIGNED: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """A tile of ``matrix``, zeros past ``row_end`` and past its last column.

    ``rows`` (R, 1) and ``columns`` (1, C) give the tile, (1, R) and (C, 1) its transpose.
    """
    if ALIGNED:
        pointers = matrix[0] + (rows.to(tl.int64) * matrix[1] + columns)
        if CHECK_ROWS:
            tile = tl.load(pointers, mask=rows < row_end, other=0.0)
        else:
            tile = tl.load(pointers)
    else:
        pointers = matrix[0] + (rows.to(tl.int64) * matrix[1] + columns * matrix[2])
        if CHECK_ROWS:
            tile = tl.load(pointers, mask=(rows < row_end) & (columns < matrix[3]), other=0.0)
        else:
            tile = tl.load(pointers, mask=columns < matrix[3], other=0.0)
    return tile


@triton.jit
def store_rows(
    ptr, head, length, rows, columns, tile, D, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):
    """Writes ``tile``, cast to the tensor's dtype, into a contiguous (heads, length, D) tensor."""
    tile = tile.to(ptr.dtype.element_ty)
    row = (head.to(tl.int64) * length + rows)[:, None]
    if ALIGNED:
        pointer = tl.multiple_of(ptr + head.to(tl.int64) * 0, 16)
        tl.store(pointer + (row * BLOCK_D + columns[None, :]), tile, mask=rows[:, None] < length)
    else:
        inside = (rows[:, None] < length) & (columns[None, :] < D)
        tl.store(ptr + (row * D + columns[None, :]), tile, mask=inside)


@triton.jit
def valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N):
    """(seqlen_q, seqlen_k) of a batch entry, clamped to the tensors' lengths."""
    seqlen_q = tl.minimum(tl.maximum(tl.load(seqlens_q_ptr + b), 0), M)
    seqlen_k = tl.minimum(tl.maximum(tl.load(seqlens_k_ptr + b), 0), N)
    return seqlen_q, seqlen_k


@triton.jit
def element_mask(offs_m, offs_n, view):
    """Where query m sees key n, for offsets that broadcast against each other."""
    distance = offs_n - (offs_m + (view[1] - view[0]))
    in_window = (distance >= -view[2]) & (distance <= view[3])
    return in_window & (offs_m < view[0]) & (offs_n < view[1])


@triton.jit
def base2_lse(lse):
    """The stored natural-log LSE in base 2; +inf where no key is visible, so that P = 0 there."""
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
