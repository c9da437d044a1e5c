"""dq in one pass: scales the sums of ``dkdv`` by sm_scale and casts them to the dtype of q."""

import triton.language as tl

from fa_kernels.kernels.common.addressing import scratch_row, store_rows, stored_rows, whole_rows
from fa_kernels.kernels.common.block_info import Grid, row_block
from fa_kernels.kernels.common.dq_layout import rows_of_blocks
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.softmax import scale_from_bits

__all__ = ["dq_postprocess_kernel"]


@kernel
def dq_postprocess_kernel(
    sums_ptr,
    dq_ptr,
    seqlens_q_ptr,
    tiles_of_head: tl.int32,
    entries: tl.int32,
    H: tl.int32,
    M: tl.int32,
    M_padded: tl.int32,
    total_q: tl.int32,
    D: tl.int32,
    sm_scale_bits: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROW_PADDING: tl.constexpr,
    VARLEN: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, from sums (B,H,M_padded,BLOCK_D) for BLOCK_M rows of a head.

    VARLEN: dq is (H,total_q,D) and sums (H,M_padded,BLOCK_D), as in ``dkdv_kernel``. IN_BLOCKS:
    sums have the layout of ``rows_of_blocks``.
    """
    grid = Grid(tiles_of_head, entries, H, seqlens_q_ptr)
    block, offset_q, seqlen_q = row_block(
        tl.program_id(0), grid, seqlens_q_ptr, M, total_q, BLOCK_M, VARLEN
    )
    b, h = block.b, block.h
    if VARLEN:
        # equivalent: A tile past the end stores no row; leaving early saves its time.
        if block.start >= seqlen_q:
            return
    offs_m = block.start + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = scratch_row(b, h, H, offset_q, M_padded, ROW_PADDING, VARLEN)
    if IN_BLOCKS:
        sums = rows_of_blocks(sums_ptr, row + block.start, BLOCK_D)
    else:
        sums = tl.load(whole_rows(sums_ptr, row, offs_m, offs_d, BLOCK_D))
    dq = sums * scale_from_bits(sm_scale_bits).to(ACC)
    first, end = stored_rows(b, h, H, offset_q, M, seqlen_q, total_q, VARLEN)
    store_rows(dq_ptr, first, end, offs_m, offs_d, dq, D, ALIGNED)
