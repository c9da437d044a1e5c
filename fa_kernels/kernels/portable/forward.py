"""Forward: one program per query tile, with an online softmax in base 2 over the key tiles.

With few queries there are few programs, each of which visits all keys. IS_SPLIT therefore divides
the key tiles of a query tile among several programs; ``combine_kernel`` combines their sums.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import (
    PAGED,
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
    normalised,
    scale_from_bits,
    with_sink,
)
from fa_kernels.kernels.common.tile_ranges import is_edge, split_range

__all__ = ["attend", "forward_kernel"]


@triton.jit
def attend(
    state,
    q,
    offs_m,
    keys,
    values,
    mask,
    mods,
    list_ptr,
    tiles,
    CONFIG: tl.constexpr,
    q_rest=None,
    BLOCK_REST: tl.constexpr = 0,
    SHARED: tl.constexpr = False,
    LISTED: tl.constexpr = True,
):
    """Updates the ``SoftmaxState`` of a query tile with the key tiles of a ``TileRange``.

    The tiles are visited in ascending order, in one loop, which evaluates the mask for edge tiles
    alone. A loop before, in and after the full tiles is three times the code, for about the same
    speed.

    BLOCK_REST: q and keys have that many columns more than BLOCK_D, for q in ``q_rest``. SHARED:
    the values are the first BLOCK_D columns of the keys. LISTED: under a predicate, ``tiles`` are
    places in the list at ``list_ptr``.
    """
    acc, l_i, m_i = state.acc, state.l, state.m
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_dv = tl.arange(0, CONFIG.BLOCK_DV)
    offs_tile = tl.arange(0, CONFIG.BLOCK_N)
    for place in range(tiles.lo, tiles.hi):
        n_block = place
        if LISTED:
            n_block = tile_index(place, list_ptr, CONFIG.PREDICATE)
        start_n = n_block * CONFIG.BLOCK_N
        offs_n = start_n + offs_tile
        valid = offs_n < mask.seqlen_k
        if CONFIG.ALIGNED >= PAGED:
            # No row sees a key that the window hides from row 0, and its page may be free.
            valid &= offs_n - (mask.seqlen_k - mask.seqlen_q) >= -mask.window_left
        # (BLOCK_D, BLOCK_N)
        k_t = load_tile(
            keys, start_n, offs_tile[None, :], offs_d[:, None], valid[None, :], CONFIG.ALIGNED,
            True,
        )  # fmt: skip
        # (BLOCK_M, BLOCK_N)
        scores = tl.dot(q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        if BLOCK_REST:
            offs_rest = CONFIG.BLOCK_D + tl.arange(0, BLOCK_REST)
            rest_t = load_tile(
                keys, start_n, offs_tile[None, :], offs_rest[:, None], valid[None, :],
                CONFIG.ALIGNED, True,
            )  # fmt: skip
            scores = tl.dot(
                q_rest, rest_t, scores, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC
            )
        if CONFIG.SCORE_MODS:
            scores, _ = apply_score_mods(
                scores, offs_m[:, None], offs_n[None, :], mask, mods, CONFIG.SCORE_MODS
            )
        if is_edge(place, tiles):
            seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * mods.qk_scale)
        # A row that has seen no key yet subtracts 0, since -inf - -inf is NaN.
        m_pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(scores * mods.qk_scale - m_pivot[:, None])
        alpha = tl.exp2(m_i - m_pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        # (BLOCK_N, BLOCK_DV)
        if SHARED:
            v = tl.trans(k_t)
        else:
            v = load_tile(
                values, start_n, offs_tile[:, None], offs_dv[None, :], valid[:, None],
                CONFIG.ALIGNED, True,
            )  # fmt: skip
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
        m_i = m_new
    return SoftmaxState(acc, l_i, m_i)


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
    total_q: tl.int32,
    total_k: tl.int32,
    D: tl.int32,
    Dv: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    num_splits: tl.int32,
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
    sinks_ptr,
    stride_sink: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    VARLEN: tl.constexpr,
    SCORE_MODS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, for one query tile of one head.

    VARLEN: out is (H,total_q,Dv) and lse (H,total_q), for B packed sequences of at most M rows and
    N keys. The pointers of lengths lead to cumulative lengths, and the first strides of q, k, v are
    their row strides. Rows that belong to no sequence are not written.

    IS_SPLIT: a program writes the sums of one split of the key tiles. out receives the unnormalised
    sums (num_splits,B,H,M,Dv), lse the maxima in base 2 (num_splits,B,H,M), and l the sums of
    weights, of the same shape.

    HAS_SINKS: each valid row also sees one key of value 0, with the head's score in sinks (H,), in
    natural units. With IS_SPLIT, only the first split holds it.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE, SCORE_MODS
    )
    batch = Batch(seqlens_q_ptr, seqlens_k_ptr, M, N, total_q, total_k)
    grid = Grid(tiles_of_head, entries, H, order_ptr)
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    bias = Tensor(bias_ptr, stride_bb, stride_bh, stride_bm, stride_bn, N)
    score_args = ScoreModArgs(softcap_bits, slopes_ptr, stride_sb, stride_sh, bias)
    program = tl.program_id(0)
    if IS_SPLIT:
        # Splits vary slowest, so neighbouring programs read the same keys for a group of heads.
        each = tl.num_programs(0) // num_splits
        split = program // each
        program = program % each
    block, seqlen = query_block(program, grid, batch, BLOCK_M, VARLEN, PREDICATE)
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
    v_tensor = Tensor(v_ptr, stride_vb, stride_vh, stride_vn, stride_vd, Dv)
    queries = head_matrix(q_tensor, seqlen.offset_q, h)
    keys = head_matrix(k_tensor, seqlen.offset_k, h // G)
    values = head_matrix(v_tensor, seqlen.offset_k, h // G)

    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = block.start + offs_tile
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    valid = (offs_m < seqlen.seqlen_q)[:, None]
    q = load_tile(queries, block.start, offs_tile[:, None], offs_d[None, :], valid, ALIGNED, True)
    sm_scale = scale_from_bits(sm_scale_bits)
    qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)
    mods = score_mods(score_args, sm_scale, qk_scale, b, h, ACC, SCORE_MODS)

    m_i = tl.full([BLOCK_M], -float("inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
    state = SoftmaxState(acc, l_i, m_i)
    tiles, list_ptr = key_tiles(block, mask, lists, CONFIG)
    if IS_SPLIT:
        tiles = split_range(tiles, split, num_splits)
    state = attend(state, q, offs_m, keys, values, mask, mods, list_ptr, tiles, CONFIG)

    first, end = stored_rows(b, h, H, seqlen.offset_q, M, seqlen.seqlen_q, total_q, VARLEN)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h.to(tl.int64) * stride_sink).to(ACC)
        if IS_SPLIT:
            sink = tl.where(split == 0, sink, -float("inf"))
        state = with_sink(state, sink)
    # Rows without a visible key or sink, padding included, get out = 0 and lse = -inf.
    if IS_SPLIT:
        # A split without tiles writes sums of 0 and maxima of -inf.
        first += split.to(tl.int64) * rows
        l_i = tl.where(offs_m < seqlen.seqlen_q, state.l, 0.0)
        tl.store(l_ptr + (first + offs_m), l_i, mask=offs_m < end)
        out, lse = state.acc, state.m
    else:
        live = (state.l > 0) & (offs_m < seqlen.seqlen_q)
        out, lse = normalised(state.acc, state.l, state.m, live)
    tl.store(lse_ptr + (first + offs_m), lse, mask=offs_m < end)
    store_rows(out_ptr, first, end, offs_m, offs_dv, out, Dv, ALIGNED)
