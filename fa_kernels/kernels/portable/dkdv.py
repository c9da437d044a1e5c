"""dk and dv: one program a key tile, K and V resident, over the query tiles of a group of heads.

Everything is transposed, (BLOCK_N, BLOCK_M), so that P' and dS' are left operands as they stand. In
one pass dq comes out of the same loop: each program adds its keys' part to sums in memory.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
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

__all__ = ["dkdv_kernel"]


@triton.jit
def _accumulate(
    dk,
    dv,
    k,
    v,
    queries,
    douts,
    lse2_pointer,
    delta_pointer,
    dq_pointer,
    view,
    offs_n,
    tiles,
    qk_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    ONE_PASS: tl.constexpr,
    MASKED: tl.constexpr,
    mods,
    MODS: tl.constexpr,
):
    """Adds query tiles of one head to dk and dv: the edge tiles if MASKED, else the full ones.

    With ONE_PASS each query tile's dq gets what these keys add to it, unscaled.
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_tile = tl.arange(0, BLOCK_M)
    for i in range(0, tile_count(tiles, MASKED)):
        m_block = tile_index(nth_tile(i, tiles, MASKED), tiles, PREDICATE)
        start_m = m_block * BLOCK_M
        offs_m = start_m + offs_tile
        # q and dout of a row without a visible key (padding rows too) are not read.
        live = offs_m < view[0]
        if MASKED:
            live = tl.load(lse2_pointer + offs_m) != float("inf")
        # (BLOCK_D, BLOCK_M)
        q_t = load_tile(
            queries, start_m, offs_tile[None, :], offs_d[:, None], live[None, :], ALIGNED, MASKED
        )
        # (BLOCK_N, BLOCK_M)
        scores = tl.dot(k, q_t, input_precision=DOTS, out_dtype=ACC)
        if MODS:
            scores, steep = modified(scores, offs_m[None, :], offs_n[:, None], view, mods, MODS)
        # (BLOCK_M, BLOCK_DV)
        dout = load_tile(
            douts, start_m, offs_tile[:, None], offs_dv[None, :], live[:, None], ALIGNED, MASKED
        )
        # (BLOCK_N, BLOCK_M)
        dp = tl.dot(v, tl.trans(dout), input_precision=DOTS, out_dtype=ACC)
        # Loaded where they are used: values kept across the dots cost registers.
        lse2 = tl.load(tl.multiple_of(lse2_pointer + start_m, 16) + offs_tile)
        p = tl.exp2(scores * qk_scale - lse2[None, :])
        if MASKED:
            seen = element_mask(offs_m[None, :], offs_n[:, None], view, PREDICATE)
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=DOTS, out_dtype=ACC)
        delta = tl.load(tl.multiple_of(delta_pointer + start_m, 16) + offs_tile)
        ds = p * (dp - delta[None, :])
        if SOFTCAP & MODS:
            ds = ds * steep
        if MASKED:
            # Selected, not multiplied by p = 0: a hidden v near the maximum makes dp infinite.
            ds = tl.where(seen, ds, 0.0)
        dk = tl.dot(ds.to(q_t.dtype), tl.trans(q_t), dk, input_precision=DOTS, out_dtype=ACC)
        if ONE_PASS:
            # Full tiles are those that all valid keys see: p of a padding key can be infinite.
            ds = tl.where(offs_n[:, None] < view[1], ds, 0.0)
            # (BLOCK_M, BLOCK_D); whole tiles, so that nothing needs a mask.
            dq = tl.dot(tl.trans(ds.to(k.dtype)), k, input_precision=DOTS, out_dtype=ACC)
            dq_tile = tl.multiple_of(dq_pointer + tl.cast(start_m, tl.int64) * BLOCK_D, 16)
            places = dq_tile + (offs_tile[:, None] * BLOCK_D + offs_d[None, :])
            tl.atomic_add(places, dq, sem="relaxed")
    return dk, dv


@kernel
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    ONE_PASS: tl.constexpr,
    PACKED: tl.constexpr,
    MODS: tl.constexpr,
):
    """Writes dk (B,Hk,N,D) and dv (B,Hk,N,Dv), contiguous, for one key tile of one kv head.

    ``stride_o*`` are the strides of dout. With ONE_PASS it adds to dq (B,H,M_padded,BLOCK_D), in
    the dtype of the accumulators and without sm_scale, by atomics; else dq is not touched. PACKED:
    dk (Hk,rows_k,D) and dv (Hk,rows_k,Dv), as in ``forward_kernel``; lse2, delta and the rows of dq
    (H,M_padded), each sequence's from a multiple of ROW_PADDING on.
    """
    Hk = H // G
    n_block, b, h_k = tile_of_program(
        tl.program_id(0), tiles_of_head, entries, Hk, seqlens_k_ptr, rows_k, BLOCK_N, False, PACKED
    )
    if PREDICATE is not None:
        n_block = tl.load(order_ptr + tl.program_id(0))
    place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
    place_k, seqlen_k = sequence(seqlens_k_ptr, b, N, rows_k, PACKED)
    start_n = n_block * BLOCK_N
    if PACKED:
        if start_n >= seqlen_k:
            return
    keys = head_matrix(k_ptr, place_k, h_k, stride_kb, stride_kh, stride_kn, stride_kd, D)
    values = head_matrix(v_ptr, place_k, h_k, stride_vb, stride_vh, stride_vn, stride_vd, Dv)

    offs_tile = tl.arange(0, BLOCK_N)
    offs_n = start_n + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = (offs_n < seqlen_k)[:, None]
    k = load_tile(keys, start_n, offs_tile[:, None], offs_d[None, :], valid, ALIGNED, True)
    v = load_tile(values, start_n, offs_tile[:, None], offs_dv[None, :], valid, ALIGNED, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    score_args = (
        softcap_bits, slopes_ptr, stride_sb, stride_sh,
        bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn,
    )  # fmt: skip
    qk_scale = base2_scale(sm_scale, ACC, MODS)

    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], ACC)
    if PREDICATE is None:
        tiles = visible_tiles(
            start_n, seqlen_k, seqlen_q, window_right, window_left, BLOCK_N, BLOCK_M
        )
    # Edges of all heads first, then full tiles of all heads: what the one loop keeps in registers
    # is not alive in the other.
    for MASKED in tl.static_range(1, -1, -1):
        for g in range(0, G):
            h = h_k * G + g
            queries = head_matrix(q_ptr, place_q, h, stride_qb, stride_qh, stride_qm, stride_qd, D)
            douts = head_matrix(
                dout_ptr, place_q, h, stride_ob, stride_oh, stride_om, stride_od, Dv
            )
            row = scratch_row(b, h, H, place_q, M_padded, ROW_PADDING, PACKED)
            mods = mods_of_head(score_args, sm_scale, b, h, ACC, MODS)
            view = (seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
            if PREDICATE is not None:
                tiles = listed_tiles(lists_ptr, b, h, n_block, stride_lb, stride_lh, stride_lt)
            dk, dv = _accumulate(
                dk, dv, k, v, queries, douts, lse2_ptr + row, delta_ptr + row,
                dq_ptr + row * BLOCK_D, view, offs_n, tiles, qk_scale,
                BLOCK_M, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, ONE_PASS, MASKED,
                mods, MODS,
            )  # fmt: skip

    # Keys past seqlen_k were zero-filled; what their rows accumulated means nothing.
    dk = tl.where(valid, dk * sm_scale.to(ACC), 0.0)
    dv = tl.where(valid, dv, 0.0)
    first, end = stored_rows(b, h_k, Hk, place_k, N, seqlen_k, rows_k, PACKED)
    store_rows(dk_ptr, first, end, offs_n, offs_d, dk, D, BLOCK_D, ALIGNED)
    store_rows(dv_ptr, first, end, offs_n, offs_dv, dv, Dv, BLOCK_DV, ALIGNED)
