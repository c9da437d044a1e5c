"""Forward: one program a query tile, online softmax in base 2 over the key tiles.

Few queries make few programs, and each goes through all keys. SPLIT: several programs a query tile
then, each for a part of the key tiles, whose sums ``merge`` puts together.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.score_mod import base2_scale, modified, mods_of_head
from fa_kernels.kernels.common.tiles import (
    element_mask,
    head_matrix,
    listed_tiles,
    load_tile,
    normalised,
    scale_from_bits,
    sequence,
    store_rows,
    stored_rows,
    tile_index,
    tile_of_program,
)
from fa_kernels.schedule.tile_ranges import part_of, visible_tiles

__all__ = ["forward_kernel"]


@triton.jit
def _attend(
    acc,
    l_i,
    m_i,
    q,
    keys,
    values,
    view,
    offs_m,
    tiles,
    first,
    last,
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
    """Takes the key tiles at the places [first, last) into the running (acc, l_i, m_i)."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_tile = tl.arange(0, BLOCK_N)
    for place in range(first, last):
        n_block = tile_index(place, tiles, PREDICATE)
        start_n = n_block * BLOCK_N
        offs_n = start_n + offs_tile
        valid = offs_n < view[1]
        # (BLOCK_D, BLOCK_N)
        k_t = load_tile(
            keys, start_n, offs_tile[None, :], offs_d[:, None], valid[None, :], ALIGNED, MASKED
        )
        # (BLOCK_M, BLOCK_N)
        scores = tl.dot(q, k_t, input_precision=DOTS, out_dtype=ACC)
        if MODS:
            scores, _ = modified(scores, offs_m[:, None], offs_n[None, :], view, mods, MODS)
        if MASKED:
            seen = element_mask(offs_m[:, None], offs_n[None, :], view, PREDICATE)
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)
        m_pivot = m_new
        if MASKED:
            # A row that has seen nothing yet subtracts 0, since -inf - -inf is NaN.
            m_pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(scores * qk_scale - m_pivot[:, None])
        alpha = tl.exp2(m_i - m_pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        # (BLOCK_N, BLOCK_DV)
        v = load_tile(
            values, start_n, offs_tile[:, None], offs_dv[None, :], valid[:, None], ALIGNED, MASKED
        )
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=DOTS, out_dtype=ACC)
        m_i = m_new
    return acc, l_i, m_i


@kernel
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    l_ptr,
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
    H: tl.int32,
    G: tl.int32,
    M: tl.int32,
    N: tl.int32,
    rows_q: tl.int32,
    rows_k: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    parts: tl.int32,
    rows: tl.int64,
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
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    MODS: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, for one query tile of one head.

    PACKED: out (H,rows_q,Dv) and lse (H,rows_q), of B sequences that follow each other, none longer
    than M or N. Their places stand where lengths do, the first strides of q, k, v are those of
    rows, and rows that belong to no sequence are not written.

    With SPLIT, what its part of the key tiles adds up to: in place of out the sums before they are
    divided (parts,B,H,M,Dv), in place of lse the maxima in base 2 (parts,B,H,M), and l, likewise.
    """
    program = tl.program_id(0)
    if SPLIT:
        # Part by part, so that programs side by side share their keys with the rest of a group.
        each = tl.num_programs(0) // parts
        part = program // each
        program = program % each
    m_block, b, h = tile_of_program(
        program, tiles_of_head, entries, H, seqlens_q_ptr, rows_q, BLOCK_M, True, PACKED
    )
    if PREDICATE is not None:
        m_block = tl.load(order_ptr + program)
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

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = start_m + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = (offs_m < seqlen_q)[:, None]
    q = load_tile(queries, start_m, offs_tile[:, None], offs_d[None, :], valid, ALIGNED, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    score_args = (
        softcap_bits, slopes_ptr, stride_sb, stride_sh,
        bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn,
    )  # fmt: skip
    qk_scale = base2_scale(sm_scale, ACC, MODS)
    mods = mods_of_head(score_args, sm_scale, b, h, ACC, MODS)

    m_i = tl.full([BLOCK_M], -float("inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
    if PREDICATE is None:
        tiles = visible_tiles(
            start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N
        )
    else:
        tiles = listed_tiles(lists_ptr, b, h, m_block, stride_lb, stride_lh, stride_lt)
    places = tiles
    if SPLIT:
        places = part_of(tiles[0], tiles[1], tiles[2], tiles[3], part, parts)
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, keys, values, view, offs_m, tiles, places[0], places[1], qk_scale,
        BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, True, mods, MODS,
    )  # fmt: skip
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, keys, values, view, offs_m, tiles, places[1], places[2], qk_scale,
        BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, False, mods, MODS,
    )  # fmt: skip
    if PREDICATE is None:
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, keys, values, view, offs_m, tiles, places[2], places[3], qk_scale,
            BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, True, mods, MODS,
        )  # fmt: skip

    first, end = stored_rows(b, h, H, place_q, M, seqlen_q, rows_q, PACKED)
    # Rows without a visible key (padding rows too): out = 0, lse = -inf.
    if SPLIT:
        # A part without tiles writes too: sums of 0, and maxima of -inf.
        first += part.to(tl.int64) * rows
        l_i = tl.where(offs_m < seqlen_q, l_i, 0.0)
        tl.store(l_ptr + (first + offs_m), l_i, mask=offs_m < end)
        out, lse = acc, m_i
    else:
        out, lse = normalised(acc, l_i, m_i, (l_i > 0) & (offs_m < seqlen_q))
    tl.store(lse_ptr + (first + offs_m), lse, mask=offs_m < end)
    store_rows(out_ptr, first, end, offs_m, offs_dv, out, Dv, BLOCK_DV, ALIGNED)
