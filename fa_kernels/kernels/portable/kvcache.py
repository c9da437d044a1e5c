"""Attention over a cache of keys and values, in pages or contiguous, and appends to it.

A contiguous cache is a paged one whose pages are as long as an entry. The tiles of keys begin at
multiples of BLOCK_N, whatever the pages are, and a tile gathers its rows from one or more pages.
The arithmetic is that of ``forward_kernel``: a query gets the same bits from any pages, and from
``forward_kernel`` in tiles of the same size.

Source: PagedAttention (arXiv:2309.06180) for the page table; FlashAttention-2 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    PAGED,
    Matrix,
    Pages,
    Tensor,
    head_matrix,
    load_tile,
    page_offsets,
    store_rows,
)
from fa_kernels.kernels.common.block_info import KernelConfig
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask
from fa_kernels.kernels.common.score_mod import ScoreModArgs, base2_scale, score_mods
from fa_kernels.kernels.common.seqlen_info import sequence
from fa_kernels.kernels.common.softmax import SoftmaxState, normalised, scale_from_bits
from fa_kernels.kernels.common.tile_ranges import visible_tiles
from fa_kernels.kernels.portable.forward import attend

__all__ = ["append_kernel", "kvcache_kernel"]


@kernel
def kvcache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seqlens_k_ptr,
    table_ptr,
    tiles_of_head: tl.int32,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qm: tl.int64,
    stride_qd: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_kd: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    stride_vd: tl.int64,
    stride_tb: tl.int64,
    stride_tp: tl.int64,
    page_size: tl.int32,
    num_pages: tl.int32,
    H: tl.int32,
    G: tl.int32,
    M: tl.int32,
    N: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    sm_scale_bits: tl.int64,
    softcap_bits: tl.int64,
    slopes_ptr,
    stride_sb: tl.int64,
    stride_sh: tl.int64,
    bias_ptr,
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bm: tl.int64,
    stride_bn: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    PREDICATE: tl.constexpr,
    SCORE_MODS: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, for one query tile of one head.

    k and v are caches (num_pages, page_size, Hk, columns) of any strides; ``stride_kb`` is that of
    pages. Row b of the table (B, places) holds the pages of entry b, which has
    ``seqlens_k[b] <= N`` keys. There is no bias: its arguments are placeholders.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, PAGED, PREDICATE, SCORE_MODS
    )
    program = tl.program_id(0)
    # Late query tiles take longest under a causal mask.
    start = (tiles_of_head - 1 - program % tiles_of_head) * BLOCK_M
    head = program // tiles_of_head
    b, h = head // H, head % H
    _, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)
    mask = AttentionMask(M, seqlen_k, window_left, window_right, b, h, h)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    queries = head_matrix(Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D), b, h)
    table_row = table_ptr + b.to(tl.int64) * stride_tb
    h_k = (h // G).to(tl.int64)
    keys = Pages(
        k_ptr + h_k * stride_kh, stride_kb, stride_kn, stride_kd, D, table_row, stride_tp,
        page_size, num_pages,
    )  # fmt: skip
    values = Pages(
        v_ptr + h_k * stride_vh, stride_vb, stride_vn, stride_vd, Dv, table_row, stride_tp,
        page_size, num_pages,
    )  # fmt: skip

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = start + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    valid = (offs_m < M)[:, None]
    q = load_tile(queries, start, offs_tile[:, None], offs_d[None, :], valid, 0, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)
    mods = score_mods(score_args, sm_scale, qk_scale, b, h, ACC, SCORE_MODS)

    m_i = tl.full([BLOCK_M], -float("inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
    state = SoftmaxState(acc, l_i, m_i)
    tiles = visible_tiles(start, M, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N)
    # Without a predicate there is no list of tiles.
    list_ptr = seqlens_k_ptr
    state = attend(
        state, q, offs_m, keys, values, mask, mods, list_ptr, tiles.lo, tiles.full_lo, CONFIG, True
    )
    state = attend(
        state, q, offs_m, keys, values, mask, mods, list_ptr, tiles.full_lo, tiles.full_hi, CONFIG,
        False,
    )  # fmt: skip
    state = attend(
        state, q, offs_m, keys, values, mask, mods, list_ptr, tiles.full_hi, tiles.hi, CONFIG, True
    )
    out, lse = normalised(state.acc, state.l, state.m, state.l > 0)
    first = head.to(tl.int64) * M
    tl.store(lse_ptr + (first + offs_m), lse, mask=offs_m < M)
    store_rows(out_ptr, first, M, offs_m, tl.arange(0, BLOCK_DV), out, Dv, BLOCK_DV, 0)


@triton.jit
def _append(new, pages, rows, first, kept, BLOCK: tl.constexpr):
    """Copies rows of a ``Matrix``, where ``kept``, to the rows from ``first`` on of a cache."""
    columns = tl.arange(0, BLOCK)[None, :]
    tile = load_tile(new, 0, rows[:, None], columns, kept[:, None], 0, True)
    offsets = page_offsets(pages, first + rows, kept)[:, None]
    pointers = pages.pointer + (offsets + columns.to(tl.int64) * pages.stride_column)
    tl.store(pointers, tile, mask=kept[:, None] & (columns < pages.columns))


@kernel
def append_kernel(
    k_ptr,
    v_ptr,
    new_k_ptr,
    new_v_ptr,
    seqlens_k_ptr,
    table_ptr,
    tiles_of_head: tl.int32,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_kd: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    stride_vd: tl.int64,
    stride_xb: tl.int64,
    stride_xh: tl.int64,
    stride_xn: tl.int64,
    stride_xd: tl.int64,
    stride_yb: tl.int64,
    stride_yh: tl.int64,
    stride_yn: tl.int64,
    stride_yd: tl.int64,
    stride_tb: tl.int64,
    stride_tp: tl.int64,
    page_size: tl.int32,
    num_pages: tl.int32,
    Hk: tl.int32,
    L: tl.int32,
    N: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Copies a tile of the new keys (B,Hk,L,D) and values (B,Hk,L,Dv) of a head into the caches.

    Row i of entry b becomes row ``seqlens_k[b] + i`` of the cache. Rows from N on have no place and
    are dropped. The other arguments are those of ``kvcache_kernel``.
    """
    program = tl.program_id(0)
    rows = program % tiles_of_head * BLOCK_N + tl.arange(0, BLOCK_N)
    head = program // tiles_of_head
    b, h = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    _, first = sequence(seqlens_k_ptr, b, N, N, False)
    kept = (rows < L) & (first + rows < N)
    table_row = table_ptr + b * stride_tb
    keys = Pages(
        k_ptr + h * stride_kh, stride_kb, stride_kn, stride_kd, D, table_row, stride_tp, page_size,
        num_pages,
    )  # fmt: skip
    values = Pages(
        v_ptr + h * stride_vh, stride_vb, stride_vn, stride_vd, Dv, table_row, stride_tp, page_size,
        num_pages,
    )  # fmt: skip
    new_k = Matrix(new_k_ptr + b * stride_xb + h * stride_xh, stride_xn, stride_xd, D)
    new_v = Matrix(new_v_ptr + b * stride_yb + h * stride_yh, stride_yn, stride_yd, Dv)
    _append(new_k, keys, rows, first, kept, BLOCK_D)
    _append(new_v, values, rows, first, kept, BLOCK_DV)
