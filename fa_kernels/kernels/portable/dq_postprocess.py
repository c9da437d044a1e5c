"""dq of one pass: what the key tiles have added up, times sm_scale, in the dtype of q."""

import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.tiles import (
    scale_from_bits,
    scratch_row,
    sequence,
    store_rows,
    stored_rows,
    tile_of_program,
    whole_rows,
)
from fa_kernels.kernels.hopper.dq_layout import rows_of_blocks

__all__ = ["dq_of_sums_kernel"]


@kernel
def dq_of_sums_kernel(
    sums_ptr,
    dq_ptr,
    seqlens_q_ptr,
    tiles_of_head: tl.int32,
    entries: tl.int32,
    H: tl.int32,
    M: tl.int32,
    M_padded: tl.int32,
    rows_q: tl.int32,
    D: tl.int32,
    sm_scale_bits: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROW_PADDING: tl.constexpr,
    PACKED: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, from sums (B,H,M_padded,BLOCK_D) for BLOCK_M rows of a head.

    PACKED: dq (H,rows_q,D), sums (H,M_padded,BLOCK_D), as of ``dkdv_kernel``. IN_BLOCKS: sums lie
    as of ``rows_of_blocks``.
    """
    tile, b, h = tile_of_program(
        tl.program_id(0), tiles_of_head, entries, H, seqlens_q_ptr, rows_q, BLOCK_M, False, PACKED
    )
    start_m = tile * BLOCK_M
    place_q, seqlen_q = b, M
    if PACKED:
        place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
        if start_m >= seqlen_q:
            return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = scratch_row(b, h, H, place_q, M_padded, ROW_PADDING, PACKED)
    if IN_BLOCKS:
        sums = rows_of_blocks(sums_ptr, row + start_m, BLOCK_D)
    else:
        sums = tl.load(whole_rows(sums_ptr, row, offs_m, offs_d, BLOCK_D))
    dq = sums * scale_from_bits(sm_scale_bits).to(ACC)
    first, end = stored_rows(b, h, H, place_q, M, seqlen_q, rows_q, PACKED)
    store_rows(dq_ptr, first, end, offs_m, offs_d, dq, D, BLOCK_D, ALIGNED)
