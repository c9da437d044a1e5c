"""Attention over a cache of keys and values, in pages or contiguous, and appends to it.

A contiguous cache is a paged one whose pages are as long as an entry. A tile of queries holds rows
of all heads of a group, so that the keys are read once for the group. The tiles of keys begin at
multiples of BLOCK_N, whatever the pages are, and a tile gathers its rows from one or more pages.

The keys of an entry are divided into splits of one length, which begin at multiples of it. Each
split has sums of its own, and the sums of splits are joined from the first to the last. One program
does both for all splits of its rows ("in turn"), or one program for each split writes its sums, and
``join_kernel`` joins them ("apart"). Both are the same compiled code up to the sums, and give the
same bits.

Within a split the arithmetic is that of ``forward_kernel``.

Source: PagedAttention (arXiv:2309.06180) for the page table; FlashAttention-2 (arXiv:2307.08691);
Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) for splits of keys.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    PAGED,
    Matrix,
    Pages,
    Tensor,
    load_tile,
    page_offsets,
    table_page,
)
from fa_kernels.kernels.common.block_info import KernelConfig
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask
from fa_kernels.kernels.common.score_mod import ScoreModArgs, base2_scale, score_mods
from fa_kernels.kernels.common.seqlen_info import sequence
from fa_kernels.kernels.common.softmax import (
    SoftmaxState,
    empty_state,
    joined,
    normalised,
    scale_from_bits,
    with_sink,
)
from fa_kernels.kernels.common.tile_ranges import TileRange, visible_tiles
from fa_kernels.kernels.portable.forward import attend

__all__ = ["append_kernel", "join_kernel", "kvcache_kernel"]


@triton.jit
def _sinks(sinks_ptr, stride_sink, sink_heads, heads, ACC: tl.constexpr):
    """Returns the sink of each row's head in natural units; -inf for heads from sink_heads on."""
    places = sinks_ptr + heads.to(tl.int64) * stride_sink
    return tl.load(places, mask=heads < sink_heads, other=-float("inf")).to(ACC)


@triton.jit
def _load_rows(rows, offs, stride, columns, valid, ALIGNED: tl.constexpr):
    """Loads columns at ``offs`` of rows, by pointers; zeros past the columns or not ``valid``.

    See ``load_tile`` for what a value of ALIGNED besides 0 and PAGED promises.
    """
    if ALIGNED != 0 and ALIGNED != PAGED:
        places = tl.multiple_of(rows[:, None], (16, 16)) + offs[None, :]
        columns = columns // 8 * 8
    else:
        places = rows[:, None] + offs.to(tl.int64)[None, :] * stride
    return tl.load(places, mask=valid[:, None] & (offs < columns)[None, :], other=0.0)


@triton.jit
def _store_rows(rows, offs, tile, columns, valid, ALIGNED: tl.constexpr):
    """Writes contiguous rows, by pointers, cast to their dtype, as ``_load_rows`` reads them."""
    places = rows[:, None]
    if ALIGNED != 0 and ALIGNED != PAGED:
        places = tl.multiple_of(places, (16, 16))
        columns = columns // 8 * 8
    tile = tile.to(rows.dtype.element_ty)
    tl.store(places + offs[None, :], tile, mask=valid[:, None] & (offs < columns)[None, :])


@triton.jit
def _head_of_cache(pages, ALIGNED: tl.constexpr):
    """Returns a head of a cache: ``pages`` itself, or the matrix of the entry's only page."""
    if ALIGNED >= PAGED:
        head = pages
    else:
        page = table_page(pages, pages.num_pages * 0, pages.num_pages > 0).to(tl.int64)
        pointer = pages.pointer + page * pages.stride_page
        head = Matrix(pointer, pages.stride_row, pages.stride_column, pages.columns)
    return head


@kernel
def kvcache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
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
    B: tl.int32,
    Hk: tl.int32,
    G: tl.int32,
    groups: tl.int32,
    M: tl.int32,
    N: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    split_tiles: tl.int32,
    apart: tl.int32,
    rows: tl.int64,
    sm_scale_bits: tl.int64,
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
    sink_heads: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SHARED: tl.constexpr,
    PREDICATE: tl.constexpr,
    SCORE_MODS: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, for one query tile of a group.

    There are Hk groups. The rows of a group's tiles are its G M rows, numbered query by query, head
    by head. ``groups`` consecutive groups read one head of the cache. G is 1 under a predicate,
    which takes one head of queries.

    k and v are caches (num_pages, page_size, heads, columns) of any strides; ``stride_kb`` is that
    of pages. Row b of the table (B, places) holds the pages of entry b, which has
    ``seqlens_k[b] <= N`` keys. If ALIGNED is below PAGED, an entry has one page. There is no bias:
    its arguments are placeholders.

    ``split_tiles`` key tiles are a split. If ``apart`` is not 0, a program has one split, and
    writes its sums to acc (splits,B,H,M,Dv), m and l (splits,B,H,M), with B H M ``rows``. A program
    whose rows see no key of its split writes nothing.

    The keys have BLOCK_D columns, padded, and BLOCK_REST more. SHARED: the values are the first
    Dv = BLOCK_D columns of the keys.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, SCORE_MODS
    )
    program = tl.program_id(0)
    # Late query tiles take longest under a causal mask.
    tile = tiles_of_head - 1 - program % tiles_of_head
    head = program // tiles_of_head
    h_k = head % Hk
    b = head // Hk % B
    split = head // Hk // B
    _, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)

    # A group can have more than 2**31 rows.
    start = tile.to(tl.int64) * BLOCK_M
    packed = start + tl.arange(0, BLOCK_M)
    offs_m = (packed // G).to(tl.int32)
    heads = h_k * G + (packed % G).to(tl.int32)
    first_m = (start // G).to(tl.int32)
    rows_here = ((start + (BLOCK_M - 1)) // G).to(tl.int32) - first_m + 1
    tiles = visible_tiles(first_m, M, seqlen_k, window_left, window_right, rows_here, BLOCK_N)
    first = tiles.lo // split_tiles
    last = (tiles.hi + split_tiles - 1) // split_tiles
    if apart:
        first = tl.maximum(first, split)
        last = tl.minimum(last, split + 1)
        if first >= last:
            return

    mask = AttentionMask(M, seqlen_k, window_left, window_right, b, h_k, mask_args)
    table_row = table_ptr + b.to(tl.int64) * stride_tb
    h_64 = (h_k // groups).to(tl.int64)
    keys = Pages(
        k_ptr + h_64 * stride_kh, stride_kb, stride_kn, stride_kd, D, table_row, stride_tp,
        page_size, num_pages,
    )  # fmt: skip
    values = Pages(
        v_ptr + h_64 * stride_vh, stride_vb, stride_vn, stride_vd, Dv, table_row, stride_tp,
        page_size, num_pages,
    )  # fmt: skip
    keys = _head_of_cache(keys, ALIGNED)
    values = _head_of_cache(values, ALIGNED)

    offs_d = tl.arange(0, BLOCK_D)
    valid = offs_m < M
    q_rows = b.to(tl.int64) * stride_qb + heads.to(tl.int64) * stride_qh
    q_rows = q_ptr + (q_rows + offs_m.to(tl.int64) * stride_qm)
    q = _load_rows(q_rows, offs_d, stride_qd, D, valid, ALIGNED)
    q_rest = q
    if BLOCK_REST:
        offs_rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        q_rest = _load_rows(q_rows, offs_rest, stride_qd, D, valid, ALIGNED)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    mods = score_mods(score_args, sm_scale, qk_scale, b, heads[:, None], ACC, SCORE_MODS)

    state = empty_state(BLOCK_M, BLOCK_DV, ACC)
    for here in range(first, last):
        lo = tl.maximum(tiles.lo, here * split_tiles)
        hi = tl.minimum(tiles.hi, (here + 1) * split_tiles)
        # All tiles count as edges, since a predicate may hide keys of each.
        part = attend(
            empty_state(BLOCK_M, BLOCK_DV, ACC), q, offs_m, keys, values, mask, mods, seqlens_k_ptr,
            TileRange(lo, hi, hi, hi), CONFIG, q_rest, BLOCK_REST, SHARED, False,
        )  # fmt: skip
        state = joined(state, part)

    offs_dv = tl.arange(0, BLOCK_DV)
    places = (b * (Hk * G) + heads).to(tl.int64) * M + offs_m
    if apart:
        places += split * rows
        tl.store(m_ptr + places, state.m, mask=valid)
        tl.store(l_ptr + places, state.l, mask=valid)
        _store_rows(acc_ptr + places * Dv, offs_dv, state.acc, Dv, valid, ALIGNED)
    else:
        sink = _sinks(sinks_ptr, stride_sink, sink_heads, heads, ACC)
        state = with_sink(state, sink)
        out, lse = normalised(state.acc, state.l, state.m, state.l > 0)
        tl.store(lse_ptr + places, lse, mask=valid)
        _store_rows(out_ptr + places * Dv, offs_dv, out, Dv, valid, ALIGNED)


@kernel
def join_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    seqlens_k_ptr,
    rows: tl.int64,
    H: tl.int32,
    M: tl.int32,
    N: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    split_keys: tl.int32,
    sinks_ptr,
    stride_sink: tl.int64,
    sink_heads: tl.int32,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M) from the sums of splits of ``split_keys`` keys.

    The arguments are those of ``kvcache_kernel``, which has written the sums. A row reads those of
    the splits that it sees a key of.
    """
    rows = tl.cast(rows, tl.int64)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = offs_r < rows
    heads = (offs_r // M % H).to(tl.int32)
    seqlen_k = tl.load(seqlens_k_ptr + offs_r // M // H, mask=valid, other=0)
    seqlen_k = tl.minimum(tl.maximum(seqlen_k, 0), N)
    position = (offs_r % M).to(tl.int32) + seqlen_k - M
    begin = tl.maximum(position - window_left, 0)
    end = tl.minimum(position + window_right + 1, seqlen_k)
    # A row that sees no key, padding included, has no split.
    # equivalent: For a row that sees no key, first or last alone leaves out every split.
    first = tl.where(begin < end, begin // split_keys, N)
    last = tl.where(begin < end, (end - 1) // split_keys + 1, 0)
    columns = (offs_dv < Dv)[None, :]

    state = empty_state(BLOCK_R, BLOCK_DV, ACC)
    for split in tl.range(tl.min(first, 0), tl.max(last, 0), loop_unroll_factor=8):
        seen = (first <= split) & (split < last)
        places = split * rows + offs_r
        m_i = tl.load(m_ptr + places, mask=seen, other=-float("inf"))
        l_i = tl.load(l_ptr + places, mask=seen, other=0.0)
        offs_acc = places[:, None] * Dv + offs_dv[None, :]
        acc = tl.load(acc_ptr + offs_acc, mask=seen[:, None] & columns, other=0.0)
        state = joined(state, SoftmaxState(acc, l_i, m_i))
    state = with_sink(state, _sinks(sinks_ptr, stride_sink, sink_heads, heads, ACC))
    out, lse = normalised(state.acc, state.l, state.m, state.l > 0)
    tl.store(lse_ptr + offs_r, lse, mask=valid)
    out = out.to(out_ptr.dtype.element_ty)
    offs_out = offs_r[:, None] * Dv + offs_dv[None, :]
    tl.store(out_ptr + offs_out, out, mask=valid[:, None] & columns)


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
