"""dbias: one program per tile of the bias.

A program recomputes P and dS as in ``dq``. It sums dS over all batch entries, heads, rows and keys
that share its tile, in a fixed order and without atomics.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import Tensor, head_matrix, load_tile
from fa_kernels.kernels.common.block_info import BlockInfo, BlockLists, KernelConfig, key_tiles
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.kernels.common.score_mod import (
    ScoreModArgs,
    apply_score_mods,
    base2_scale,
    score_mods,
)
from fa_kernels.kernels.common.seqlen_info import valid_lengths
from fa_kernels.kernels.common.softmax import scale_from_bits

__all__ = ["dbias_kernel"]

_CHUNK: tl.constexpr = tl.constexpr(64)


class _Over(NamedTuple):
    """Whether the bias is broadcast over each axis."""

    B: Any
    H: Any
    M: Any
    N: Any


class _Span(NamedTuple):
    """The part of the scores that a program's tile of the bias is added to.

    Along each axis it is one element or tile, or the whole axis if the bias is broadcast over it.
    """

    matrix: Any
    b_first: Any
    b_last: Any
    h_first: Any
    h_last: Any
    m_first: Any
    m_last: Any
    n_first: Any
    n_last: Any


class _Head(NamedTuple):
    """The matrices of one query head, and pointers to row 0 of its scratch."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse2_pointer: Any
    delta_pointer: Any


class _QueryTile(NamedTuple):
    """A query tile of one head, with lse in base 2 and delta of each row."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any
    offs_m: Any


@triton.jit
def _span(program, B, H, m_blocks, n_blocks, OVER: tl.constexpr):
    """Returns the ``_Span`` of a program; tiles vary fastest, then heads, then batch entries."""
    rest = program
    n_first, n_last = 0, n_blocks
    if not OVER.N:
        n_first = rest % n_blocks
        n_last = n_first + 1
        rest = rest // n_blocks
    m_first, m_last = 0, m_blocks
    if not OVER.M:
        m_first = rest % m_blocks
        m_last = m_first + 1
        rest = rest // m_blocks
    matrix = rest
    h_first, h_last = 0, H
    if not OVER.H:
        h_first = rest % H
        h_last = h_first + 1
        rest = rest // H
    b_first, b_last = 0, B
    if not OVER.B:
        b_first = rest
        b_last = b_first + 1
    return _Span(matrix, b_first, b_last, h_first, h_last, m_first, m_last, n_first, n_last)


@triton.jit
def _is_listed(tiles, list_ptr, n_block):
    """Whether a tile is in a list of ``listed_tiles``."""
    found = 0
    for first in range(0, tiles.hi, _CHUNK):
        places = first + tl.arange(0, _CHUNK)
        listed = tl.load(list_ptr + places, mask=places < tiles.hi, other=-1)
        found += tl.sum((listed == n_block).to(tl.int32), 0)
    return found > 0


@triton.jit
def _load_query_tile(head, start_m, CONFIG: tl.constexpr):
    """Loads the ``_QueryTile`` that begins at row ``start_m``."""
    offs_tile = tl.arange(0, CONFIG.BLOCK_M)
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_m = start_m + offs_tile
    lse2 = tl.load(head.lse2_pointer + offs_m)
    delta = tl.load(head.delta_pointer + offs_m)
    # q and dout of a row without a visible key (padding rows too) are not read.
    live = (lse2 != float("inf"))[:, None]
    q = load_tile(head.q, start_m, offs_tile[:, None], offs_d[None, :], live, CONFIG.ALIGNED, True)
    dout = load_tile(
        head.dout, start_m, offs_tile[:, None], offs_dv[None, :], live, CONFIG.ALIGNED, True
    )
    return _QueryTile(q, dout, lse2, delta, offs_m)


@triton.jit
def _compute_ds(rows, head, n_block, mask, mods, CONFIG: tl.constexpr):
    """Returns dS of a query tile and a key tile: the gradient by the scores after the bias."""
    offs_tile = tl.arange(0, CONFIG.BLOCK_N)
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_m = rows.offs_m
    start_n = n_block * CONFIG.BLOCK_N
    offs_n = start_n + offs_tile
    valid = (offs_n < mask.seqlen_k)[None, :]
    # (BLOCK_D, BLOCK_N) and (BLOCK_DV, BLOCK_N)
    k_t = load_tile(
        head.k, start_n, offs_tile[None, :], offs_d[:, None], valid, CONFIG.ALIGNED, True
    )
    v_t = load_tile(
        head.v, start_n, offs_tile[None, :], offs_dv[:, None], valid, CONFIG.ALIGNED, True
    )
    # (BLOCK_M, BLOCK_N)
    scores = tl.dot(rows.q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
    scores, _ = apply_score_mods(
        scores, offs_m[:, None], offs_n[None, :], mask, mods, CONFIG.SCORE_MODS
    )
    dp = tl.dot(rows.dout, v_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
    p = tl.exp2(scores * mods.qk_scale - rows.lse2[:, None])
    ds = p * (dp - rows.delta[:, None])
    seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)
    return tl.where(seen, ds, 0.0)


@triton.jit
def _accumulate(acc, head, mask, mods, span, lists, CONFIG: tl.constexpr):
    """Adds the tiles of one head that lie in the span."""
    for m_block in range(span.m_first, span.m_last):
        block = BlockInfo(m_block, m_block * CONFIG.BLOCK_M, mask.b, mask.h)
        rows = _load_query_tile(head, block.start, CONFIG)
        tiles, list_ptr = key_tiles(block, mask, lists, CONFIG)
        for n_block in range(span.n_first, span.n_last):
            if CONFIG.PREDICATE is None:
                visited = (n_block >= tiles.lo) & (n_block < tiles.hi)
            else:
                visited = _is_listed(tiles, list_ptr, n_block)
            if visited:
                acc += _compute_ds(rows, head, n_block, mask, mods, CONFIG)
    return acc


@triton.jit
def _store(dbias_ptr, acc, span, M, N, OVER: tl.constexpr, CONFIG: tl.constexpr):
    """Writes the tile of a program; a broadcast axis of the bias has one row or column."""
    rows, columns = M, N
    offs_rows = (span.m_first * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M))[:, None]
    offs_columns = (span.n_first * CONFIG.BLOCK_N + tl.arange(0, CONFIG.BLOCK_N))[None, :]
    if OVER.M:
        acc = tl.sum(acc, 0)[None, :]
        rows = 1
        offs_rows = tl.zeros([1, 1], tl.int32)
    if OVER.N:
        acc = tl.sum(acc, 1)[:, None]
        columns = 1
        offs_columns = tl.zeros([1, 1], tl.int32)
    inside = (offs_rows < rows) & (offs_columns < columns)
    place = (span.matrix.to(tl.int64) * rows + offs_rows) * columns + offs_columns
    tl.store(dbias_ptr + place, acc.to(dbias_ptr.dtype.element_ty), mask=inside)


@kernel
def dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dbias_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
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
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    sm_scale_bits: tl.int64,
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
    B: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    SCORE_MODS: tl.constexpr,
    OVER_B: tl.constexpr,
    OVER_H: tl.constexpr,
    OVER_M: tl.constexpr,
    OVER_N: tl.constexpr,
):
    """Writes dbias (B or 1,H or 1,M or 1,N or 1), contiguous; an axis is 1 if its OVER_* is true.

    ``stride_o*`` are the strides of dout.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, SCORE_MODS
    )
    OVER: tl.constexpr = _Over(OVER_B, OVER_H, OVER_M, OVER_N)
    q_tensor = Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D)
    k_tensor = Tensor(k_ptr, stride_kb, stride_kh, stride_kn, stride_kd, D)
    v_tensor = Tensor(v_ptr, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    dout_tensor = Tensor(dout_ptr, stride_ob, stride_oh, stride_om, stride_od, Dv)
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)
    span = _span(tl.program_id(0), B, H, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), OVER)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for entry in range(span.b_first, span.b_last):
        b = tl.cast(entry, tl.int32)
        seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
        for query_head in range(span.h_first, span.h_last):
            h = tl.cast(query_head, tl.int32)
            mask = AttentionMask(seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
            mods = score_mods(score_args, sm_scale, qk_scale, b, h, ACC, SCORE_MODS)
            row = tl.cast(b * H + h, tl.int64) * M_padded
            head = _Head(
                head_matrix(q_tensor, b, h),
                head_matrix(k_tensor, b, h // G),
                head_matrix(v_tensor, b, h // G),
                head_matrix(dout_tensor, b, h),
                lse2_ptr + row,
                delta_ptr + row,
            )
            acc = _accumulate(acc, head, mask, mods, span, lists, CONFIG)
    _store(dbias_ptr, acc, span, M, N, OVER, CONFIG)
