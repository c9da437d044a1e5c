"""Gradient of a merge of attention states with respect to the out and lse of each part.

    w_p     = exp(lse_p - lse)                the share of part p in a row
    d_p     = dout . out_p
    dout_p  = w_p dout
    dlse_p  = w_p (d_p - sum_q w_q d_q + dlse)

Shares and their sum are computed from the lses of the parts, and the sum over q from their outs.
The merged out and lse, which are rounded, are not read.

Source: the derivative of out = sum_p w_p out_p and lse = log sum_p exp(lse_p).
"""

import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.portable.combine import row_offsets, state_weight

__all__ = ["combine_bwd_kernel"]


@kernel
def combine_bwd_kernel(
    outs_ptr,
    lses_ptr,
    dout_ptr,
    dlse_ptr,
    douts_ptr,
    dlses_ptr,
    stride_as: tl.int64,
    stride_ab: tl.int64,
    stride_ah: tl.int64,
    stride_am: tl.int64,
    stride_ad: tl.int64,
    stride_ms: tl.int64,
    stride_mb: tl.int64,
    stride_mh: tl.int64,
    stride_mm: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_om: tl.int64,
    stride_od: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lm: tl.int64,
    num_splits: tl.int32,
    rows: tl.int64,
    H: tl.int32,
    M: tl.int32,
    Dv: tl.int32,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
):
    """Writes douts (num_splits,B,H,M,Dv) and dlses (num_splits,B,H,M), contiguous.

    outs (num_splits,B,H,M,Dv), lses (num_splits,B,H,M), dout (B,H,M,Dv) and dlse (B,H,M) have any
    strides; there are B H M rows. Parts that saw no key get zeros, and their out is not read.
    """
    # Offsets of parts can exceed 32 bits even if the number of rows does not.
    rows = tl.cast(rows, tl.int64)
    stride_as = tl.cast(stride_as, tl.int64)
    stride_ms = tl.cast(stride_ms, tl.int64)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = offs_r < rows
    inside = valid[:, None] & (offs_dv < Dv)[None, :]
    lse_rows = lses_ptr + row_offsets(offs_r, H, M, stride_mb, stride_mh, stride_mm)
    out_rows = outs_ptr + row_offsets(offs_r, H, M, stride_ab, stride_ah, stride_am)
    columns = offs_dv.to(tl.int64)
    dout_rows = dout_ptr + row_offsets(offs_r, H, M, stride_ob, stride_oh, stride_om)
    dout = tl.load(dout_rows[:, None] + (columns * stride_od)[None, :], mask=inside, other=0.0)
    dlse_rows = dlse_ptr + row_offsets(offs_r, H, M, stride_lb, stride_lh, stride_lm)
    dlse = tl.load(dlse_rows, mask=valid, other=0.0)

    largest = tl.full([BLOCK_R], -float("inf"), ACC)
    for split in range(0, num_splits):
        lse_part = tl.load(lse_rows + split * stride_ms, mask=valid, other=-float("inf"))
        largest = tl.maximum(largest, lse_part)
    l_i = tl.zeros([BLOCK_R], ACC)
    delta = tl.zeros([BLOCK_R], ACC)
    for split in range(0, num_splits):
        lse_part = tl.load(lse_rows + split * stride_ms, mask=valid, other=-float("inf"))
        live = lse_part != -float("inf")
        offs_out = (out_rows + split * stride_as)[:, None] + (columns * stride_ad)[None, :]
        out = tl.load(offs_out, mask=inside & live[:, None], other=0.0).to(ACC)
        weight = state_weight(lse_part, largest)
        l_i += weight
        delta += weight * tl.sum(out * dout, 1)
    # In a row in which no part saw a key, l is 0, dout holds anything, and no part is live below.
    delta = delta / l_i
    for split in range(0, num_splits):
        lse_part = tl.load(lse_rows + split * stride_ms, mask=valid, other=-float("inf"))
        live = lse_part != -float("inf")
        offs_out = (out_rows + split * stride_as)[:, None] + (columns * stride_ad)[None, :]
        out = tl.load(offs_out, mask=inside & live[:, None], other=0.0).to(ACC)
        share = state_weight(lse_part, largest) / l_i
        slope = tl.sum(out * dout, 1) - delta + dlse
        offs_part = split * rows + offs_r
        tl.store(dlses_ptr + offs_part, tl.where(live, share * slope, 0.0), mask=valid)
        dout_part = tl.where(live[:, None], share[:, None] * dout, 0.0)
        offs_dout = offs_part[:, None] * Dv + offs_dv[None, :]
        tl.store(douts_ptr + offs_dout, dout_part, mask=inside)
