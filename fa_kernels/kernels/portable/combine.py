"""Combine: computes out and lse of all keys from the results of the parts of each row's keys.

The splits of one call are unnormalised sums relative to their own maximum m. Weighted by
2^(m - largest m), they add up to the sums over all keys, as the tiles of an online softmax do. They
are neither normalised nor converted to logarithms, so a row that one split alone sees keeps every
bit. Under STATES the parts are results of whole calls: normalised out, and the natural lse in place
of m. A part is then a sum of weight 1 relative to its lse.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with the sums of FlashAttention-2
(arXiv:2307.08691), Algorithm 1, in place of normalised splits and their lse.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.softmax import LOG2E, normalised

__all__ = ["combine_kernel", "row_offsets", "state_weight"]


@triton.jit
def row_offsets(offs_r, H, M, stride_b, stride_h, stride_m):
    """Returns the 64-bit offsets of rows, numbered through (B,H,M), in a tensor of any strides."""
    head = offs_r // M
    return head // H * stride_b + head % H * stride_h + offs_r % M * stride_m


@triton.jit
def state_weight(lse_part, largest):
    """Returns e^(lse_part - largest), and exactly 0 for a part that saw no key.

    The difference is taken in natural units. Logarithms that are close to each other subtract
    without a rounding there, however large they are. The result is NaN where lse is NaN or +inf.
    """
    return tl.where(lse_part == -float("inf"), 0.0, tl.exp2((lse_part - largest) * LOG2E))


@kernel
def combine_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    stride_as: tl.int64,
    stride_ab: tl.int64,
    stride_ah: tl.int64,
    stride_am: tl.int64,
    stride_ad: tl.int64,
    stride_ms: tl.int64,
    stride_mb: tl.int64,
    stride_mh: tl.int64,
    stride_mm: tl.int64,
    num_splits: tl.int32,
    rows: tl.int64,
    H: tl.int32,
    M: tl.int32,
    Dv: tl.int32,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    STATES: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), contiguous, from acc (num_splits,B,H,M,Dv) and m
    (num_splits,B,H,M) of any strides; there are B H M rows.

    l (num_splits,B,H,M) is contiguous. Under STATES l is not read, and neither is acc of a part
    that saw no key.
    """
    # Offsets of splits can exceed 32 bits even if the number of rows does not.
    rows = tl.cast(rows, tl.int64)
    stride_as = tl.cast(stride_as, tl.int64)
    stride_ms = tl.cast(stride_ms, tl.int64)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = offs_r < rows
    inside = valid[:, None] & (offs_dv < Dv)[None, :]
    m_rows = m_ptr + row_offsets(offs_r, H, M, stride_mb, stride_mh, stride_mm)
    acc_rows = acc_ptr + row_offsets(offs_r, H, M, stride_ab, stride_ah, stride_am)
    columns = offs_dv.to(tl.int64) * stride_ad

    m_i = tl.full([BLOCK_R], -float("inf"), ACC)
    for split in range(0, num_splits):
        m_split = tl.load(m_rows + split * stride_ms, mask=valid, other=-float("inf"))
        m_i = tl.maximum(m_i, m_split)
    l_i = tl.zeros([BLOCK_R], ACC)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], ACC)
    for split in range(0, num_splits):
        m_split = tl.load(m_rows + split * stride_ms, mask=valid, other=-float("inf"))
        seen = inside
        if STATES:
            seen = inside & (m_split != -float("inf"))[:, None]
            weight = state_weight(m_split, m_i)
            l_i += weight
        else:
            l_split = tl.load(l_ptr + (split * rows + offs_r), mask=valid, other=0.0)
            weight = tl.exp2(m_split - m_i)
            l_i += l_split * weight
        offs_acc = (acc_rows + split * stride_as)[:, None] + columns[None, :]
        acc_split = tl.load(offs_acc, mask=seen, other=0.0).to(ACC)
        acc += acc_split * weight[:, None]

    if STATES:
        # A NaN of l is not 0, so that a NaN or +inf of an lse reaches out and lse.
        out, log_l = normalised(acc, l_i, tl.zeros([BLOCK_R], ACC), l_i != 0)
        lse = m_i + log_l
    else:
        # If no split sees a row, weights and l are NaN (from -inf - -inf), so the row is not live.
        out, lse = normalised(acc, l_i, m_i, l_i > 0)
    tl.store(lse_ptr + offs_r, lse, mask=valid)
    tl.store(out_ptr + (offs_r[:, None] * Dv + offs_dv[None, :]), out, mask=inside)
