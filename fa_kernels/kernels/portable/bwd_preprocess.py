"""Preprocessing for the backward: delta = rowsum(out * dout) - dlse, and lse in base 2.

In one pass it also zeros the sums of dq.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, line 4.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    Matrix,
    Tensor,
    head_matrix,
    load_tile,
    scratch_row,
    stored_rows,
)
from fa_kernels.kernels.common.block_info import Grid, row_block
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.softmax import LOG2E

__all__ = ["bwd_preprocess_kernel"]


@triton.jit
def _row_sums(x):
    """Sums each row in a balanced tree of neighbours; rows are 2 to 256 wide.

    The order of ``tl.sum`` depends on the layout of its operand, and so on the strides of the
    loads: equal values could give different bits. Fused multiply-adds would depend on the layout
    too, so the kernel is launched with enable_fp_fusion=False.
    """
    # equivalent: After eight halvings a row is one wide, and a ninth adds nothing.
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = even + odd
    return tl.reshape(x, [x.shape[0]])


@kernel
def bwd_preprocess_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    sums_ptr,
    seqlens_q_ptr,
    tiles_of_head: tl.int32,
    entries: tl.int32,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_om: tl.int64,
    stride_od: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lm: tl.int64,
    H: tl.int32,
    M: tl.int32,
    M_padded: tl.int32,
    total_q: tl.int32,
    Dv: tl.int32,
    has_dlse: tl.int32,
    columns: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROW_PADDING: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Writes lse2 and delta (B,H,M_padded) for BLOCK_M rows of one head.

    Dead rows (without a visible key, in padding, or past M) get lse2 = +inf, so that their P is 0,
    and delta = 0. ``stride_o*`` are the strides of dout and ``stride_l*`` those of dlse, which is
    not read if ``has_dlse`` is 0. out (B,H,M,Dv) is contiguous. sums (B,H,M_padded,columns) is
    zeroed; ``columns`` is a multiple of 16, and 0 without sums.

    VARLEN: lse2, delta and the rows of sums are (H,M_padded), with whole tiles of ROW_PADDING rows
    for each of B sequences; out is (H,total_q,Dv) as in ``forward_kernel``.
    """
    OF_TILE: tl.constexpr = ROW_PADDING // BLOCK_M
    grid = Grid(tiles_of_head, entries, H, seqlens_q_ptr)
    block, offset_q, seqlen_q = row_block(
        tl.program_id(0) // OF_TILE, grid, seqlens_q_ptr, M, total_q, ROW_PADDING, VARLEN
    )
    b, h = block.b, block.h
    start_m = block.start + tl.program_id(0) % OF_TILE * BLOCK_M
    if VARLEN:
        if start_m >= tl.cdiv(seqlen_q, ROW_PADDING) * ROW_PADDING:
            return
    first, end = stored_rows(b, h, H, offset_q, M, seqlen_q, total_q, VARLEN)
    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = start_m + offs_tile
    offs_dv = tl.arange(0, BLOCK_DV)[None, :]
    lse = tl.load(lse_ptr + (first + offs_m), mask=offs_m < end, other=-float("inf"))
    # dout of a row without a visible key may hold anything and is not read.
    live_m = lse != -float("inf")
    live = live_m[:, None]
    dout_tensor = Tensor(dout_ptr, stride_ob, stride_oh, stride_om, stride_od, Dv)
    douts = head_matrix(dout_tensor, offset_q, h)
    dout = load_tile(douts, start_m, offs_tile[:, None], offs_dv, live, ALIGNED, True)
    outs = Matrix(out_ptr + first * Dv, tl.cast(Dv, tl.int64), 1, Dv)
    out = load_tile(outs, start_m, offs_tile[:, None], offs_dv, live, ALIGNED, True)
    delta = _row_sums(out.to(ACC) * dout.to(ACC))
    if has_dlse:
        dlses = dlse_ptr + offset_q * stride_lb + h * stride_lh
        delta -= tl.load(dlses + offs_m * stride_lm, mask=live_m, other=0.0)
    row = scratch_row(b, h, H, offset_q, M_padded, ROW_PADDING, VARLEN)
    lse2 = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    tl.store(lse2_ptr + (row + offs_m), lse2)
    tl.store(delta_ptr + (row + offs_m), delta)
    # The rows of a program are contiguous in sums.
    CHUNK: tl.constexpr = BLOCK_M * 16
    sums = tl.multiple_of(sums_ptr + (row + start_m) * columns, 16)
    for chunk in range(0, columns // 16):
        tl.store(sums + (chunk * CHUNK + tl.arange(0, CHUNK)), tl.zeros([CHUNK], ACC))
