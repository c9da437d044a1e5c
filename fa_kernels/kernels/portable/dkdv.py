"""dk and dv: one program per key tile, which visits the query tiles of a group of heads.

K and V stay resident. Scores are transposed, (BLOCK_N, BLOCK_M), so that P' and dS' are left
operands without a transposition. In one pass the loop also computes dq: each program adds the
contribution of its keys to sums in global memory.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
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
    key_block,
    listed_tiles,
    nth_tile,
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
from fa_kernels.kernels.common.tile_ranges import visible_tiles

__all__ = ["dkdv_kernel"]


class _KeyTile(NamedTuple):
    """The keys and values of a program."""

    k: Any
    v: Any
    offs_n: Any


class _HeadRows(NamedTuple):
    """The matrices of one query head, and pointers to row 0 of its scratch."""

    queries: Any
    douts: Any
    lse2_pointer: Any
    delta_pointer: Any
    dq_pointer: Any


@triton.jit
def _without_hidden(x, offs_m, offs_n, mask, PREDICATE: tl.constexpr):
    """Returns x (BLOCK_N, BLOCK_M), with zeros where a query does not see a key."""
    seen = element_mask(offs_m[None, :], offs_n[:, None], mask, PREDICATE)
    return tl.where(seen, x, 0.0)


@triton.jit
def _accumulate(
    dk,
    dv,
    keys,
    rows,
    mask,
    mods,
    tiles,
    list_ptr,
    edges,
    CONFIG: tl.constexpr,
    ONE_PASS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Adds query tiles of one head to dk and dv: the edge tiles if ``edges``, else the full tiles.

    Without CHECK_ROWS, they are full tiles. With ONE_PASS, it also adds the contribution of these
    keys to dq, without sm_scale.
    """
    k, v, offs_n = keys.k, keys.v, keys.offs_n
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_tile = tl.arange(0, CONFIG.BLOCK_M)
    for i in range(0, tile_count(tiles, edges)):
        m_block = tile_index(nth_tile(i, tiles, edges), list_ptr, CONFIG.PREDICATE)
        start_m = m_block * CONFIG.BLOCK_M
        offs_m = start_m + offs_tile
        # q and dout of rows without a visible key, padding included, are not read.
        # equivalent: Edge tiles set it again below, and full tiles do not read it.
        live = offs_m < mask.seqlen_q
        if edges:
            live = tl.load(rows.lse2_pointer + offs_m) != float("inf")
        # (BLOCK_D, BLOCK_M)
        q_t = load_tile(
            rows.queries, start_m, offs_tile[None, :], offs_d[:, None], live[None, :],
            CONFIG.ALIGNED, CHECK_ROWS,
        )  # fmt: skip
        # (BLOCK_N, BLOCK_M)
        scores = tl.dot(k, q_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        if CONFIG.SCORE_MODS:
            scores, dtanh = apply_score_mods(
                scores, offs_m[None, :], offs_n[:, None], mask, mods, CONFIG.SCORE_MODS
            )
        # (BLOCK_M, BLOCK_DV)
        dout = load_tile(
            rows.douts, start_m, offs_tile[:, None], offs_dv[None, :], live[:, None],
            CONFIG.ALIGNED, CHECK_ROWS,
        )  # fmt: skip
        # (BLOCK_N, BLOCK_M)
        dp = tl.dot(v, tl.trans(dout), input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        # Loaded where they are used: values kept across the dots cost registers.
        lse2 = tl.load(tl.multiple_of(rows.lse2_pointer + start_m, 16) + offs_tile)
        p = tl.exp2(scores * mods.qk_scale - lse2[None, :])
        if edges:
            p = _without_hidden(p, offs_m, offs_n, mask, CONFIG.PREDICATE)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        delta = tl.load(tl.multiple_of(rows.delta_pointer + start_m, 16) + offs_tile)
        ds = p * (dp - delta[None, :])
        if SOFTCAP & CONFIG.SCORE_MODS:
            ds = ds * dtanh
        if edges:
            # A product with p = 0 would not do: a hidden v near the largest finite value makes dp
            # infinite.
            ds = _without_hidden(ds, offs_m, offs_n, mask, CONFIG.PREDICATE)
        dk = tl.dot(
            ds.to(q_t.dtype), tl.trans(q_t), dk, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC
        )
        if ONE_PASS:
            # In full tiles p of a padding key is not masked and can be infinite.
            ds = tl.where(offs_n[:, None] < mask.seqlen_k, ds, 0.0)
            # (BLOCK_M, BLOCK_D). The sums have whole tiles of rows, so no mask is needed.
            dq = tl.dot(
                tl.trans(ds.to(k.dtype)), k, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC
            )
            place = tl.cast(start_m, tl.int64) * CONFIG.BLOCK_D
            dq_tile = tl.multiple_of(rows.dq_pointer + place, 16)
            places = dq_tile + (offs_tile[:, None] * CONFIG.BLOCK_D + offs_d[None, :])
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
    ONE_PASS: tl.constexpr,
    VARLEN: tl.constexpr,
    SCORE_MODS: tl.constexpr,
):
    """Writes dk (B,Hk,N,D) and dv (B,Hk,N,Dv), contiguous, for one key tile of one kv head.

    ``stride_o*`` are the strides of dout. With ONE_PASS, it adds to dq (B,H,M_padded,BLOCK_D) by
    atomics, in the dtype of the accumulators and without sm_scale; else dq is not accessed.

    VARLEN: dk is (Hk,total_k,D) and dv (Hk,total_k,Dv), as in ``forward_kernel``. lse2, delta and
    the rows of dq are (H,M_padded), where each sequence begins at a multiple of ROW_PADDING.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, SCORE_MODS
    )
    Hk = H // G
    batch = Batch(seqlens_q_ptr, seqlens_k_ptr, M, N, total_q, total_k)
    grid = Grid(tiles_of_head, entries, Hk, order_ptr)
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    block, seqlen = key_block(tl.program_id(0), grid, batch, BLOCK_N, VARLEN, PREDICATE)
    if VARLEN:
        if block.start >= seqlen.seqlen_k:
            return
    b, h_k = block.b, block.h
    q_tensor = Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D)
    k_tensor = Tensor(k_ptr, stride_kb, stride_kh, stride_kn, stride_kd, D)
    v_tensor = Tensor(v_ptr, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    dout_tensor = Tensor(dout_ptr, stride_ob, stride_oh, stride_om, stride_od, Dv)
    key_matrix = head_matrix(k_tensor, seqlen.offset_k, h_k)
    value_matrix = head_matrix(v_tensor, seqlen.offset_k, h_k)

    offs_tile = tl.arange(0, BLOCK_N)
    offs_n = block.start + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = (offs_n < seqlen.seqlen_k)[:, None]
    k = load_tile(
        key_matrix, block.start, offs_tile[:, None], offs_d[None, :], valid, ALIGNED, True
    )
    v = load_tile(
        value_matrix, block.start, offs_tile[:, None], offs_dv[None, :], valid, ALIGNED, True
    )
    keys = _KeyTile(k, v, offs_n)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)

    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], ACC)
    if PREDICATE is None:
        list_ptr = lists_ptr
        tiles = visible_tiles(
            block.start, seqlen.seqlen_k, seqlen.seqlen_q, window_right, window_left, BLOCK_N,
            BLOCK_M,
        )  # fmt: skip
    # Edge tiles of all heads come first, then full tiles of all heads. One loop for both kinds
    # takes fewer registers than two, and is at least as fast, except in 16 bits with up to 128
    # columns and in fp32 with 65 to 128.
    BITS: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth
    WIDEST: tl.constexpr = max(BLOCK_D, BLOCK_DV)
    TWO_LOOPS: tl.constexpr = WIDEST <= 128 and (BITS == 16 or (BITS == 32 and WIDEST > 64))
    for LOOP in tl.static_range(0, 2 if TWO_LOOPS else 1):
        for full in range(LOOP, LOOP + 1 if TWO_LOOPS else 2):
            for g in range(0, G):
                h = h_k * G + g
                queries = head_matrix(q_tensor, seqlen.offset_q, h)
                douts = head_matrix(dout_tensor, seqlen.offset_q, h)
                row = scratch_row(b, h, H, seqlen.offset_q, M_padded, ROW_PADDING, VARLEN)
                mods = score_mods(score_args, sm_scale, qk_scale, b, h, ACC, SCORE_MODS)
                mask = AttentionMask(
                    seqlen.seqlen_q, seqlen.seqlen_k, window_left, window_right, b, h, mask_args
                )
                if PREDICATE is not None:
                    tiles, list_ptr = listed_tiles(lists, b, h, block.index)
                rows = _HeadRows(
                    queries, douts, lse2_ptr + row, delta_ptr + row, dq_ptr + row * BLOCK_D
                )
                dk, dv = _accumulate(
                    dk, dv, keys, rows, mask, mods, tiles, list_ptr, full == 0, CONFIG, ONE_PASS,
                    LOOP == 0,
                )  # fmt: skip

    # Rows of keys past seqlen_k, which were loaded as zeros, have accumulated garbage.
    dk = tl.where(valid, dk * sm_scale.to(ACC), 0.0)
    dv = tl.where(valid, dv, 0.0)
    first, end = stored_rows(b, h_k, Hk, seqlen.offset_k, N, seqlen.seqlen_k, total_k, VARLEN)
    store_rows(dk_ptr, first, end, offs_n, offs_d, dk, D, ALIGNED)
    store_rows(dv_ptr, first, end, offs_n, offs_dv, dv, Dv, ALIGNED)
