"""dq: one program per query tile, which visits the key tiles; Q and dO stay resident.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, the dQ part, without its atomics.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    Tensor,
    head_matrix,
    load_tile,
    scratch_row,
    store_rows,
    stored_rows,
)
from fa_kernels.kernels.common.block_info import (
    BlockLists,
    Grid,
    KernelConfig,
    key_tiles,
    nth_tile,
    query_block,
    tile_count,
    tile_index,
)
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.kernels.common.score_mod import (
    SOFTCAP,
    ScoreModArgs,
    apply_score_mods,
    base2_scale,
    score_mods,
)
from fa_kernels.kernels.common.seqlen_info import Batch
from fa_kernels.kernels.common.softmax import scale_from_bits

__all__ = ["dq_kernel"]


class _QueryTile(NamedTuple):
    """The query tile of a program, with lse in base 2 and delta of each row."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any
    offs_m: Any


@triton.jit
def _accumulate(
    dq,
    rows,
    keys,
    values,
    mask,
    mods,
    tiles,
    list_ptr,
    CONFIG: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds key tiles to dq of a ``_QueryTile``: the edge tiles if MASKED, else the full tiles."""
    offs_m = rows.offs_m
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_tile = tl.arange(0, CONFIG.BLOCK_N)
    for i in range(0, tile_count(tiles, MASKED)):
        n_block = tile_index(nth_tile(i, tiles, MASKED), list_ptr, CONFIG.PREDICATE)
        start_n = n_block * CONFIG.BLOCK_N
        offs_n = start_n + offs_tile
        valid = (offs_n < mask.seqlen_k)[None, :]
        # (BLOCK_D, BLOCK_N) and (BLOCK_DV, BLOCK_N)
        k_t = load_tile(
            keys, start_n, offs_tile[None, :], offs_d[:, None], valid, CONFIG.ALIGNED, MASKED
        )
        v_t = load_tile(
            values, start_n, offs_tile[None, :], offs_dv[:, None], valid, CONFIG.ALIGNED, MASKED
        )
        # (BLOCK_M, BLOCK_N)
        scores = tl.dot(rows.q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        if CONFIG.SCORE_MODS:
            scores, dtanh = apply_score_mods(
                scores, offs_m[:, None], offs_n[None, :], mask, mods, CONFIG.SCORE_MODS
            )
        dp = tl.dot(rows.dout, v_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        p = tl.exp2(scores * mods.qk_scale - rows.lse2[:, None])
        ds = p * (dp - rows.delta[:, None])
        if SOFTCAP & CONFIG.SCORE_MODS:
            ds = ds * dtanh
        if MASKED:
            # A product with p = 0 would not do: p of a hidden key and dp of a hidden v can be
            # infinite.
            seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(
            ds.to(k_t.dtype), tl.trans(k_t), dq, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC
        )
    return dq


@kernel
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    tiles_of_head: tl.int32,
    entries: tl.int32,
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
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_om: tl.int64,
    stride_od: tl.int64,
    H: tl.int32,
    G: tl.int32,
    M: tl.int32,
    M_padded: tl.int32,
    N: tl.int32,
    total_q: tl.int32,
    total_k: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    sm_scale_bits: tl.int64,
    order_ptr,
    lists_ptr,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lt: tl.int64,
    mask_args,
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
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    ROW_PADDING: tl.constexpr,
    VARLEN: tl.constexpr,
    SCORE_MODS: tl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, for one query tile of one head.

    ``stride_o*`` are the strides of dout.

    VARLEN: dq is (H,total_q,D), as in ``forward_kernel``. lse2 and delta are (H,M_padded), where
    each sequence begins at a multiple of ROW_PADDING.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, SCORE_MODS
    )
    batch = Batch(seqlens_q_ptr, seqlens_k_ptr, M, N, total_q, total_k)
    grid = Grid(tiles_of_head, entries, H, order_ptr)
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    block, seqlen = query_block(tl.program_id(0), grid, batch, BLOCK_M, VARLEN, PREDICATE)
    if VARLEN:
        if block.start >= seqlen.seqlen_q:
            return
    b, h = block.b, block.h
    mask = AttentionMask(
        seqlen.seqlen_q, seqlen.seqlen_k, window_left, window_right, b, h, mask_args
    )
    q_tensor = Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D)
    k_tensor = Tensor(k_ptr, stride_kb, stride_kh, stride_kn, stride_kd, D)
    v_tensor = Tensor(v_ptr, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    dout_tensor = Tensor(dout_ptr, stride_ob, stride_oh, stride_om, stride_od, Dv)
    queries = head_matrix(q_tensor, seqlen.offset_q, h)
    keys = head_matrix(k_tensor, seqlen.offset_k, h // G)
    values = head_matrix(v_tensor, seqlen.offset_k, h // G)
    douts = head_matrix(dout_tensor, seqlen.offset_q, h)

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = block.start + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    row = scratch_row(b, h, H, seqlen.offset_q, M_padded, ROW_PADDING, VARLEN) + offs_m
    lse2 = tl.load(lse2_ptr + row)
    delta = tl.load(delta_ptr + row)
    # q and dout of rows without a visible key, padding included, are not read; their dq is 0.
    live = (lse2 != float("inf"))[:, None]
    q = load_tile(queries, block.start, offs_tile[:, None], offs_d[None, :], live, ALIGNED, True)
    dout = load_tile(douts, block.start, offs_tile[:, None], offs_dv[None, :], live, ALIGNED, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)
    mods = score_mods(score_args, sm_scale, qk_scale, b, h, ACC, SCORE_MODS)

    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    rows = _QueryTile(q, dout, lse2, delta, offs_m)
    tiles, list_ptr = key_tiles(block, mask, lists, CONFIG)
    for MASKED in tl.static_range(1, -1, -1):
        dq = _accumulate(dq, rows, keys, values, mask, mods, tiles, list_ptr, CONFIG, MASKED)
    first, end = stored_rows(b, h, H, seqlen.offset_q, M, seqlen.seqlen_q, total_q, VARLEN)
    store_rows(dq_ptr, first, end, offs_m, offs_d, dq * sm_scale.to(ACC), D, ALIGNED)
