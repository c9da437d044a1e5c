"""Forward of e4m3 queries, keys and values with scales, in the tiles of ``forward_kernel``.

Tensor cores take both operands of a product of 8 bits along its sum. ``columns_kernel`` therefore
writes v by columns first, with zeros for padding.

P is cast to e4m3 relative to the row's maximum, times 2**P_OFFSET: weights down to 2**-17 of the
largest one keep a bit, where 2**-9 would without the offset.

Source: FlashAttention-3 (arXiv:2407.08608), section 3.3, without its incoherent processing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    Tensor,
    head_matrix,
    load_tile,
    store_rows,
    stored_rows,
)
from fa_kernels.kernels.common.block_info import (
    BlockLists,
    Grid,
    KernelConfig,
    key_block,
    key_tiles,
    query_block,
    tile_index,
)
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.kernels.common.score_mod import (
    ScoreModArgs,
    apply_score_mods,
    base2_scale,
    score_mods,
)
from fa_kernels.kernels.common.seqlen_info import Batch
from fa_kernels.kernels.common.softmax import (
    SoftmaxState,
    empty_state,
    normalised,
    scale_from_bits,
    with_sink,
)
from fa_kernels.kernels.common.tile_ranges import is_edge

__all__ = ["P_OFFSET", "columns_kernel", "forward_fp8_kernel"]

# P reaches 2**8, and e4m3 448.
P_OFFSET: tl.constexpr = tl.constexpr(8)


class _Scales(NamedTuple):
    """The scales of one head: of rows of a query tile, and those of keys from ``k_ptr`` on."""

    of_rows: Any
    k_ptr: Any
    stride_key: Any


@triton.jit
def _head_scales(ptr, stride_entry, stride_head, offset, h):
    """Returns a pointer to the scale of a head's first row; strides are 64-bit."""
    return ptr + offset * stride_entry + h * stride_head


@triton.jit
def _attend(
    state, q, offs_m, keys, values, keys_padded, scales, mask, mods, list_ptr, tiles,
    CONFIG: tl.constexpr, OF_TOKENS: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    """Updates the ``SoftmaxState`` of a query tile, whose sums are 2**P_OFFSET times as large.

    ``values`` points to the first key of a head's first column of values. Columns are
    ``keys_padded`` apart, a multiple of BLOCK_N.
    ``scales.of_rows`` multiply the dots. OF_TOKENS: so do the scales of keys; else they are part of
    those of rows. IMPRECISE: products that tensor cores add before a sum in float32.
    """
    acc, l_i, m_i = state.acc, state.l, state.m
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_tile = tl.arange(0, CONFIG.BLOCK_N)
    stride = keys_padded // CONFIG.BLOCK_N * CONFIG.BLOCK_N
    columns = offs_dv[:, None] * stride
    row_scales = scales.of_rows * mods.qk_scale
    if CONFIG.SCORE_MODS:
        row_scales = tl.full([CONFIG.BLOCK_M], 1.0, tl.float32) * mods.qk_scale
    for place in range(tiles.lo, tiles.hi):
        start_n = tile_index(place, list_ptr, CONFIG.PREDICATE) * CONFIG.BLOCK_N
        offs_n = start_n + offs_tile
        valid = offs_n < mask.seqlen_k
        # (BLOCK_D, BLOCK_N)
        k_t = load_tile(
            keys, start_n, offs_tile[None, :], offs_d[:, None], valid[None, :], CONFIG.ALIGNED,
            True,
        )  # fmt: skip
        # (BLOCK_M, BLOCK_N)
        scores = tl.dot(q, k_t, max_num_imprecise_acc=IMPRECISE)
        if OF_TOKENS:
            places = scales.k_ptr + offs_n.to(tl.int64) * scales.stride_key
            scores *= tl.load(places, mask=valid, other=1.0)[None, :]
        if CONFIG.SCORE_MODS:
            scores, _ = apply_score_mods(
                scores * scales.of_rows[:, None], offs_m[:, None], offs_n[None, :], mask, mods,
                CONFIG.SCORE_MODS,
            )  # fmt: skip
        # equivalent: The mask of a full tile hides nothing; leaving it out saves time.
        if is_edge(place, tiles):
            seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * row_scales)
        # A row that has seen no key yet subtracts 0, since -inf - -inf is NaN.
        m_pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(scores * row_scales[:, None] - (m_pivot - P_OFFSET)[:, None])
        alpha = tl.exp2(m_i - m_pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        # (BLOCK_DV, BLOCK_N), whole tiles
        v_t = tl.load(tl.multiple_of(values + start_n, 16) + columns + offs_tile[None, :])
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_t.dtype), tl.trans(v_t), acc, max_num_imprecise_acc=IMPRECISE)
        m_i = m_new
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def _first_column(
    ptr, b, h, Hk, offset, keys_padded, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Returns a pointer to the first key of a head's first column of values.

    Each head has BLOCK_DV columns of ``keys_padded`` keys. Under VARLEN they hold all sequences:
    each begins at a multiple of BLOCK, far enough from the next one for any lengths.
    """
    head, start = b * Hk + h, 0
    if VARLEN:
        head, start = h, (offset + b * BLOCK) // BLOCK * BLOCK
    return ptr + (head * BLOCK_DV * keys_padded + start)


@kernel
def columns_kernel(
    v_ptr,
    columns_ptr,
    seqlens_k_ptr,
    tiles_of_head: tl.int32,
    entries: tl.int32,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    stride_vd: tl.int64,
    Hk: tl.int32,
    N: tl.int32,
    total_k: tl.int32,
    Dv: tl.int32,
    keys_padded: tl.int64,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Writes a tile of keys of one head by columns; keys of padding and further columns are 0."""
    batch = Batch(seqlens_k_ptr, seqlens_k_ptr, N, N, total_k, total_k)
    grid = Grid(tiles_of_head, entries, Hk, seqlens_k_ptr)
    block, seqlen = key_block(tl.program_id(0), grid, batch, BLOCK_N, VARLEN, None)
    if VARLEN:
        # A tile past the end of a sequence may lie in the next one.
        # equivalent: In the interpreter, whose programs run in order, that one is written later.
        if block.start >= seqlen.seqlen_k:
            return
    offs_tile = tl.arange(0, BLOCK_N)
    offs_dv = tl.arange(0, BLOCK_DV)
    tensor = Tensor(v_ptr, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    values = head_matrix(tensor, seqlen.offset_k, block.h)
    valid = block.start + offs_tile < seqlen.seqlen_k
    tile = load_tile(
        values, block.start, offs_tile[:, None], offs_dv[None, :], valid[:, None], ALIGNED, True
    )
    first = _first_column(
        columns_ptr, block.b, block.h, Hk, seqlen.offset_k, keys_padded, BLOCK_DV, BLOCK_N, VARLEN
    )
    stride = keys_padded // BLOCK_N * BLOCK_N
    places = offs_dv[:, None] * stride + offs_tile[None, :]
    tl.store(tl.multiple_of(first + block.start, 16) + places, tl.trans(tile))


@kernel
def forward_fp8_kernel(
    q_ptr,
    k_ptr,
    columns_ptr,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    keys_padded: tl.int64,
    q_scale_entry: tl.int64,
    q_scale_head: tl.int64,
    q_scale_row: tl.int64,
    k_scale_entry: tl.int64,
    k_scale_head: tl.int64,
    k_scale_row: tl.int64,
    v_scale_entry: tl.int64,
    v_scale_head: tl.int64,
    H: tl.int32,
    G: tl.int32,
    M: tl.int32,
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
    sinks_ptr,
    stride_sink: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    VARLEN: tl.constexpr,
    SCORE_MODS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, for one query tile of one head.

    ``columns_ptr`` leads to values as ``columns_kernel`` writes them.

    VARLEN: as in ``forward_kernel``; the entry strides of q_scale and k_scale are then their row
    strides.
    OF_TOKENS: k_scale has a scale for each key; else ``k_scale_row`` is not read.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, tl.float32, "ieee", ALIGNED, PREDICATE, SCORE_MODS
    )
    batch = Batch(seqlens_q_ptr, seqlens_k_ptr, M, N, total_q, total_k)
    grid = Grid(tiles_of_head, entries, H, order_ptr)
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    block, seqlen = query_block(tl.program_id(0), grid, batch, BLOCK_M, VARLEN, PREDICATE)
    if VARLEN:
        # equivalent: A tile past the end stores no row; leaving early saves its time.
        if block.start >= seqlen.seqlen_q:
            return
    b, h = block.b, block.h
    mask = AttentionMask(
        seqlen.seqlen_q, seqlen.seqlen_k, window_left, window_right, b, h, mask_args
    )
    q_tensor = Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D)
    k_tensor = Tensor(k_ptr, stride_kb, stride_kh, stride_kn, stride_kd, D)
    queries = head_matrix(q_tensor, seqlen.offset_q, h)
    keys = head_matrix(k_tensor, seqlen.offset_k, h // G)
    values = _first_column(
        columns_ptr, b, h // G, H // G, seqlen.offset_k, keys_padded, BLOCK_DV, BLOCK_N, VARLEN
    )

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = block.start + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    is_row = offs_m < seqlen.seqlen_q
    q = load_tile(
        queries, block.start, offs_tile[:, None], offs_d[None, :], is_row[:, None], ALIGNED, True
    )
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, tl.float32, SCORE_MODS)
    mods = score_mods(score_args, sm_scale, qk_scale, b, h, tl.float32, SCORE_MODS)

    of_rows = _head_scales(q_scale_ptr, q_scale_entry, q_scale_head, seqlen.offset_q, h)
    of_keys = _head_scales(k_scale_ptr, k_scale_entry, k_scale_head, seqlen.offset_k, h // G)
    row_scales = tl.load(of_rows + offs_m.to(tl.int64) * q_scale_row, mask=is_row, other=1.0)
    if not OF_TOKENS:
        row_scales *= tl.load(of_keys)
    scales = _Scales(row_scales, of_keys, k_scale_row)
    state = empty_state(BLOCK_M, BLOCK_DV, tl.float32)
    tiles, list_ptr = key_tiles(block, mask, lists, CONFIG)
    state = _attend(
        state, q, offs_m, keys, values, keys_padded, scales, mask, mods, list_ptr, tiles, CONFIG,
        OF_TOKENS, IMPRECISE,
    )  # fmt: skip

    # The sums are relative to 2**(m - P_OFFSET).
    state = SoftmaxState(state.acc, state.l, state.m - P_OFFSET)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h.to(tl.int64) * stride_sink)
        state = with_sink(state, sink)
    live = (state.l > 0) & is_row
    out, lse = normalised(state.acc, state.l, state.m, live)
    v_scales = _head_scales(v_scale_ptr, v_scale_entry, v_scale_head, b, h // G)
    out *= tl.load(v_scales)
    first, end = stored_rows(b, h, H, seqlen.offset_q, M, seqlen.seqlen_q, total_q, VARLEN)
    # Rows without a visible key or sink, padding included, get out = 0 and lse = -inf.
    tl.store(lse_ptr + (first + offs_m), lse, mask=offs_m < end)
    store_rows(out_ptr, first, end, offs_m, offs_dv, out, Dv, ALIGNED)
