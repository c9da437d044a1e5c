"""dq: one program a query tile, Q and dO resident, over the key tiles.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, the dQ part, without its atomics.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.score_mod import SOFTCAP, base2_scale, modified, mods_of_head
from fa_kernels.kernels.common.tiles import (
    element_mask,
    head_matrix,
    listed_tiles,
    load_tile,
    nth_tile,
    scale_from_bits,
    scratch_row,
    sequence,
    store_rows,
    stored_rows,
    tile_count,
    tile_index,
    tile_of_program,
)
from fa_kernels.schedule.tile_ranges import visible_tiles

__all__ = ["dq_kernel"]


@triton.jit
def _accumulate(
    dq,
    q,
    dout,
    lse2,
    delta,
    keys,
    values,
    view,
    offs_m,
    tiles,
    qk_scale,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    MASKED: tl.constexpr,
    mods,
    MODS: tl.constexpr,
):
    """Adds key tiles to dq: the edge tiles if MASKED, else the full ones."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_tile = tl.arange(0, BLOCK_N)
    for i in range(0, tile_count(tiles, MASKED)):
        n_block = tile_index(nth_tile(i, tiles, MASKED), tiles, PREDICATE)
        start_n = n_block * BLOCK_N
        offs_n = start_n + offs_tile
        valid = (offs_n < view[1])[None, :]
        # (BLOCK_D, BLOCK_N) and (BLOCK_DV, BLOCK_N)
        k_t = load_tile(keys, start_n, offs_tile[None, :], offs_d[:, None], valid, ALIGNED, MASKED)
        v_t = load_tile(
            values, start_n, offs_tile[None, :], offs_dv[:, None], valid, ALIGNED, MASKED
        )
        # (BLOCK_M, BLOCK_N)
        scores = tl.dot(q, k_t, input_precision=DOTS, out_dtype=ACC)
        if MODS:
            scores, steep = modified(scores, offs_m[:, None], offs_n[None, :], view, mods, MODS)
        dp = tl.dot(dout, v_t, input_precision=DOTS, out_dtype=ACC)
        p = tl.exp2(scores * qk_scale - lse2[:, None])
        ds = p * (dp - delta[:, None])
        if SOFTCAP & MODS:
            ds = ds * steep
        if MASKED:
            # Selected, not multiplied by p = 0: p of a hidden key and dp of a hidden v can be
            # infinite.
            seen = element_mask(offs_m[:, None], offs_n[None, :], view, PREDICATE)
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(k_t.dtype), tl.trans(k_t), dq, input_precision=DOTS, out_dtype=ACC)
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
    rows_q: tl.int32,
    rows_k: tl.int32,
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
    PACKED: tl.constexpr,
    MODS: tl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, for one query tile of one head.

    ``stride_o*`` are the strides of dout. PACKED: dq (H,rows_q,D), as in ``forward_kernel``; lse2
    and delta (H,M_padded), each sequence's from a multiple of ROW_PADDING on.
    """
    m_block, b, h = tile_of_program(
        tl.program_id(0), tiles_of_head, entries, H, seqlens_q_ptr, rows_q, BLOCK_M, True, PACKED
    )
    if PREDICATE is not None:
        m_block = tl.load(order_ptr + tl.program_id(0))
    place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
    place_k, seqlen_k = sequence(seqlens_k_ptr, b, N, rows_k, PACKED)
    start_m = m_block * BLOCK_M
    if PACKED:
        if start_m >= seqlen_q:
            return
    view = (seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
    queries = head_matrix(q_ptr, place_q, h, stride_qb, stride_qh, stride_qm, stride_qd, D)
    keys = head_matrix(k_ptr, place_k, h // G, stride_kb, stride_kh, stride_kn, stride_kd, D)
    values = head_matrix(v_ptr, place_k, h // G, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    douts = head_matrix(dout_ptr, place_q, h, stride_ob, stride_oh, stride_om, stride_od, Dv)

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = start_m + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    row = scratch_row(b, h, H, place_q, M_padded, ROW_PADDING, PACKED) + offs_m
    lse2 = tl.load(lse2_ptr + row)
    delta = tl.load(delta_ptr + row)
    # q and dout of a row without a visible key (padding rows too) are not read: its dq is 0.
    live = (lse2 != float("inf"))[:, None]
    q = load_tile(queries, start_m, offs_tile[:, None], offs_d[None, :], live, ALIGNED, True)
    dout = load_tile(douts, start_m, offs_tile[:, None], offs_dv[None, :], live, ALIGNED, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    score_args = (
        softcap_bits, slopes_ptr, stride_sb, stride_sh,
        bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn,
    )  # fmt: skip
    qk_scale = base2_scale(sm_scale, ACC, MODS)
    mods = mods_of_head(score_args, sm_scale, b, h, ACC, MODS)

    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    if PREDICATE is None:
        tiles = visible_tiles(
            start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N
        )
    else:
        tiles = listed_tiles(lists_ptr, b, h, m_block, stride_lb, stride_lh, stride_lt)
    for MASKED in tl.static_range(1, -1, -1):
        dq = _accumulate(
            dq, q, dout, lse2, delta, keys, values, view, offs_m, tiles, qk_scale,
            BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, MASKED, mods, MODS,
        )  # fmt: skip
    first, end = stored_rows(b, h, H, place_q, M, seqlen_q, rows_q, PACKED)
    store_rows(dq_ptr, first, end, offs_m, offs_d, dq * sm_scale.to(ACC), D, BLOCK_D, ALIGNED)
