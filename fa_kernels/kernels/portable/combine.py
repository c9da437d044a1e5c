"""Combine: computes out and lse from the unnormalised sums of the splits of each row's keys.

Each split has sums relative to its own maximum m. Weighted by 2^(m - largest m), they add up to the
sums over all keys, as the tiles of an online softmax do. Splits are neither normalised nor
converted to logarithms, so a row that one split alone sees keeps every bit.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with the sums of FlashAttention-2
(arXiv:2307.08691), Algorithm 1, in place of normalised splits and their lse.
"""

import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.softmax import normalised

__all__ = ["combine_kernel"]


@kernel
def combine_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    num_splits: tl.int32,
    rows: tl.int64,
    Dv: tl.int32,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
):
    """Writes out (rows,Dv) and lse (rows,) from acc (num_splits,rows,Dv), m and l
    (num_splits,rows).

    There are B H M rows; all tensors are contiguous.
    """
    # Offsets of splits can exceed 32 bits even if the number of rows does not.
    rows = tl.cast(rows, tl.int64)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = offs_r < rows
    inside = valid[:, None] & (offs_dv < Dv)[None, :]

    m_i = tl.full([BLOCK_R], -float("inf"), ACC)
    for split in range(0, num_splits):
        m_split = tl.load(m_ptr + (split * rows + offs_r), mask=valid, other=-float("inf"))
        m_i = tl.maximum(m_i, m_split)
    l_i = tl.zeros([BLOCK_R], ACC)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], ACC)
    for split in range(0, num_splits):
        offs_split = split * rows + offs_r
        m_split = tl.load(m_ptr + offs_split, mask=valid, other=-float("inf"))
        l_split = tl.load(l_ptr + offs_split, mask=valid, other=0.0)
        offs_acc = offs_split[:, None] * Dv + offs_dv[None, :]
        acc_split = tl.load(acc_ptr + offs_acc, mask=inside, other=0.0)
        weight = tl.exp2(m_split - m_i)
        l_i += l_split * weight
        acc += acc_split * weight[:, None]

    # If no split sees a row, weights and l are NaN (from -inf - -inf), so the row is not live.
    out, lse = normalised(acc, l_i, m_i, l_i > 0)
    tl.store(lse_ptr + offs_r, lse, mask=valid)
    tl.store(out_ptr + (offs_r[:, None] * Dv + offs_dv[None, :]), out, mask=inside)
