"""dbias: one program a tile of the bias, over everything that the tile is added to.

P and dS are recomputed as in ``dq``. Entries, heads, rows and keys that share a bias are added up
by the program that writes its gradient, in one order: there are no atomics.
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
    scale_from_bits,
    valid_lengths,
)
from fa_kernels.schedule.tile_ranges import visible_tiles

__all__ = ["dbias_kernel"]

_CHUNK: tl.constexpr = tl.constexpr(64)


@triton.jit
def _is_listed(tiles, n_block):
    """Whether a tile stands in a list of ``listed_tiles``."""
    found = 0
    for first in range(0, tiles[3], _CHUNK):
        places = first + tl.arange(0, _CHUNK)
        listed = tl.load(tiles[4] + places, mask=places < tiles[3], other=-1)
        found += tl.sum((listed == n_block).to(tl.int32), 0)
    return found > 0


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
    MODS: tl.constexpr,
    OVER_B: tl.constexpr,
    OVER_H: tl.constexpr,
    OVER_M: tl.constexpr,
    OVER_N: tl.constexpr,
):
    """Writes dbias (B or 1, H or 1, M or 1, N or 1), contiguous: 1 where OVER_* is true.

    ``stride_o*`` are the strides of dout.
    """
    m_blocks = tl.cdiv(M, BLOCK_M)
    n_blocks = tl.cdiv(N, BLOCK_N)
    rest = tl.program_id(0)
    # What this program's tile is added to: one of each, or all of it.
    n_first, n_last = 0, n_blocks
    if not OVER_N:
        n_first = rest % n_blocks
        n_last = n_first + 1
        rest = rest // n_blocks
    m_first, m_last = 0, m_blocks
    if not OVER_M:
        m_first = rest % m_blocks
        m_last = m_first + 1
        rest = rest // m_blocks
    matrix = rest
    h_first, h_last = 0, H
    if not OVER_H:
        h_first = rest % H
        h_last = h_first + 1
        rest = rest // H
    b_first, b_last = 0, B
    if not OVER_B:
        b_first = rest
        b_last = b_first + 1

    offs_tile_m = tl.arange(0, BLOCK_M)
    offs_tile_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    sm_scale = scale_from_bits(sm_scale_bits)
    score_args = (
        softcap_bits, slopes_ptr, stride_sb, stride_sh,
        bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn,
    )  # fmt: skip
    qk_scale = base2_scale(sm_scale, ACC, MODS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for entry in range(b_first, b_last):
        b = tl.cast(entry, tl.int32)
        seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
        for head in range(h_first, h_last):
            h = tl.cast(head, tl.int32)
            view = (seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
            mods = mods_of_head(score_args, sm_scale, b, h, ACC, MODS)
            queries = head_matrix(q_ptr, b, h, stride_qb, stride_qh, stride_qm, stride_qd, D)
            keys = head_matrix(k_ptr, b, h // G, stride_kb, stride_kh, stride_kn, stride_kd, D)
            values = head_matrix(v_ptr, b, h // G, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
            douts = head_matrix(dout_ptr, b, h, stride_ob, stride_oh, stride_om, stride_od, Dv)
            row = tl.cast(b * H + h, tl.int64) * M_padded
            for m_block in range(m_first, m_last):
                start_m = m_block * BLOCK_M
                offs_m = start_m + offs_tile_m
                lse2 = tl.load(lse2_ptr + row + offs_m)
                delta = tl.load(delta_ptr + row + offs_m)
                # q and dout of a row without a visible key (padding rows too) are not read.
                live = (lse2 != float("inf"))[:, None]
                q = load_tile(
                    queries, start_m, offs_tile_m[:, None], offs_d[None, :], live, ALIGNED, True
                )
                dout = load_tile(
                    douts, start_m, offs_tile_m[:, None], offs_dv[None, :], live, ALIGNED, True
                )
                if PREDICATE is None:
                    tiles = visible_tiles(
                        start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N
                    )
                else:
                    tiles = listed_tiles(lists_ptr, b, h, m_block, stride_lb, stride_lh, stride_lt)
                for n_block in range(n_first, n_last):
                    if PREDICATE is None:
                        visited = (n_block >= tiles[0]) & (n_block < tiles[3])
                    else:
                        visited = _is_listed(tiles, n_block)
                    if visited:
                        start_n = n_block * BLOCK_N
                        offs_n = start_n + offs_tile_n
                        valid = (offs_n < seqlen_k)[None, :]
                        # (BLOCK_D, BLOCK_N) and (BLOCK_DV, BLOCK_N)
                        k_t = load_tile(
                            keys, start_n, offs_tile_n[None, :], offs_d[:, None], valid, ALIGNED,
                            True,
                        )  # fmt: skip
                        v_t = load_tile(
                            values, start_n, offs_tile_n[None, :], offs_dv[:, None], valid,
                            ALIGNED, True,
                        )  # fmt: skip
                        # (BLOCK_M, BLOCK_N)
                        scores = tl.dot(q, k_t, input_precision=DOTS, out_dtype=ACC)
                        scores, _ = modified(
                            scores, offs_m[:, None], offs_n[None, :], view, mods, MODS
                        )
                        dp = tl.dot(dout, v_t, input_precision=DOTS, out_dtype=ACC)
                        p = tl.exp2(scores * qk_scale - lse2[:, None])
                        ds = p * (dp - delta[:, None])
                        seen = element_mask(offs_m[:, None], offs_n[None, :], view, PREDICATE)
                        acc += tl.where(seen, ds, 0.0)

    # A matrix of the bias holds its rows and columns, or one that all share.
    rows, columns = M, N
    offs_rows = (m_first * BLOCK_M + offs_tile_m)[:, None]
    offs_columns = (n_first * BLOCK_N + offs_tile_n)[None, :]
    if OVER_M:
        acc = tl.sum(acc, 0)[None, :]
        rows = 1
        offs_rows = tl.zeros([1, 1], tl.int32)
    if OVER_N:
        acc = tl.sum(acc, 1)[:, None]
        columns = 1
        offs_columns = tl.zeros([1, 1], tl.int32)
    inside = (offs_rows < rows) & (offs_columns < columns)
    place = (matrix.to(tl.int64) * rows + offs_rows) * columns + offs_columns
    tl.store(dbias_ptr + place, acc.to(dbias_ptr.dtype.element_ty), mask=inside)
