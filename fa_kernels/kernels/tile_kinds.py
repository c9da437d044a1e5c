"""What a mask leaves of each tile: nothing, a part, or all of it, asked of its predicate."""

import triton.language as tl

from fa_kernels.kernels.kernel import kernel
from fa_kernels.kernels.tiles import element_mask, valid_lengths

__all__ = ["tile_kinds_kernel"]


@kernel
def tile_kinds_kernel(
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
    """Writes kinds (B,H,m_blocks,n_blocks,3), int8, of one tile of one head.

    [0]: a pair is visible; [1]: every valid row sees every key of the tile; [2]: every valid key is
    seen by every row of the tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    n_block = (tile % n_blocks).to(tl.int32)
    m_block = (tile // n_blocks % m_blocks).to(tl.int32)
    bh = (tile // n_blocks // m_blocks).to(tl.int32)
    b = bh // H
    h = bh % H
    seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
    view = (seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
    offs_m = (m_block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_n = (n_block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    of_rows = (m_block * BLOCK_M >= seqlen_q).to(tl.int32)
    of_keys = (n_block * BLOCK_N >= seqlen_k).to(tl.int32)
    some = of_rows * 0
    if of_rows + of_keys == 0:
        seen = element_mask(offs_m, offs_n, view, PREDICATE)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        of_rows = tl.min(tl.min((seen | (offs_m >= seqlen_q)).to(tl.int32), 1), 0)
        of_keys = tl.min(tl.min((seen | (offs_n >= seqlen_k)).to(tl.int32), 1), 0)
    tl.store(kinds_ptr + tile * 3, some.to(tl.int8))
    tl.store(kinds_ptr + tile * 3 + 1, of_rows.to(tl.int8))
    tl.store(kinds_ptr + tile * 3 + 2, of_keys.to(tl.int8))
