"""Classifies the tiles of a mask with a predicate as hidden, partially visible or fully visible."""

import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.kernels.common.seqlen_info import valid_lengths

__all__ = ["classify_blocks_kernel"]


@kernel
def classify_blocks_kernel(
    kinds_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    H: tl.int32,
    M: tl.int32,
    N: tl.int32,
    m_blocks: tl.int32,
    n_blocks: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    mask_args,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREDICATE: tl.constexpr,
):
    """Writes kinds (B,H,m_blocks,n_blocks,3), int8, for one tile of one head.

    [0] is 1 if a pair is visible, [1] if every valid row sees every key of the tile, and [2] if
    every row of the tile sees every valid key.
    """
    tile = tl.program_id(0)
    n_block = tile % n_blocks
    m_block = tile // n_blocks % m_blocks
    bh = tile // n_blocks // m_blocks
    b = bh // H
    h = bh % H
    seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
    mask = AttentionMask(seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
    start_m, start_n = m_block * BLOCK_M, n_block * BLOCK_N
    offs_m = (start_m + tl.arange(0, BLOCK_M))[:, None]
    offs_n = (start_n + tl.arange(0, BLOCK_N))[None, :]
    kind_ptr = kinds_ptr + tile * 3
    if (start_m < seqlen_q) & (start_n < seqlen_k):
        seen = element_mask(offs_m, offs_n, mask, PREDICATE)
        of_rows = seen | (offs_m >= seqlen_q)
        of_keys = seen | (offs_n >= seqlen_k)
        tl.store(kind_ptr, tl.max(tl.max(seen, 1), 0))
        tl.store(kind_ptr + 1, tl.min(tl.min(of_rows, 1), 0))
        tl.store(kind_ptr + 2, tl.min(tl.min(of_keys, 1), 0))
    else:
        # The predicate gets no padding. Statements about every row or key of none hold.
        tl.store(kind_ptr, 0)
        tl.store(kind_ptr + 1, start_m >= seqlen_q)
        tl.store(kind_ptr + 2, start_n >= seqlen_k)
