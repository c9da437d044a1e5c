"""Forward on Hopper: copies by TMA, asynchronous products, warpgroups of rows and one of loads.

Consumers have 64 rows of a query tile each: two of them, or three where values are narrow and
their sums leave registers for a third. While the tensor cores work for one, another takes its
softmax; of two each does so beside its own product of P and V as well. A producer loads the keys
and values of all, as far ahead as there are stages, and of one query tile while the one before
ends. What is computed is what ``forward`` computes, in the same order of sums.

Source: FlashAttention-3 (arXiv:2407.08608), Algorithms 1 and 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.common.addressing import store_rows, stored_rows
from fa_kernels.kernels.common.mask import pairs_seen
from fa_kernels.kernels.common.score_mod import base2_scale
from fa_kernels.kernels.common.seqlen_info import sequence, sequence_of_tile
from fa_kernels.kernels.common.softmax import normalised, scale_from_bits
from fa_kernels.kernels.common.tile_ranges import tile_of_head, visible_tiles
from fa_kernels.kernels.hopper.pipeline import (
    PROGRAMS_TOGETHER,
    WARPGROUP_ROWS,
    add_product,
    async_load,
    block_of,
    matrix,
    start_scores,
    thread_barrier,
    wide,
    zero_rows,
)

__all__ = ["hopper_forward_kernel"]


@gluon.jit
def _work(turn, call, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, PACKED: gl.constexpr):
    """(places, h, start_m, consumers, view, key tiles) of the query tile whose turn it is.

    Places are those of queries and of keys, as of ``sequence``.
    """
    seqlens_q_ptr, seqlens_k_ptr, sizes, of_head, windows, _ = call
    heads, H, _, M, N, rows_q, rows_k, _ = sizes
    m_blocks, narrow, entries = of_head
    BLOCK_M: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    place, head = tile_of_head(turn, m_blocks, heads, PROGRAMS_TOGETHER)
    # Late query tiles first: under causal masking they are the long ones.
    m_block = m_blocks - 1 - place
    b = head // H
    if PACKED:
        if entries > 0:
            b, m_block = sequence_of_tile(m_block, seqlens_q_ptr, entries, rows_q, BLOCK_M)
    consumers = CONSUMERS
    if m_block < narrow:
        consumers = CONSUMERS - 1
    start_m = (m_block * CONSUMERS - min(m_block, narrow)) * WARPGROUP_ROWS
    place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
    place_k, seqlen_k = sequence(seqlens_k_ptr, b, N, rows_k, PACKED)
    view = (seqlen_q, seqlen_k, windows[0], windows[1])
    # As of a wide tile: a narrow one may visit a key tile that is hidden from all of its rows.
    tiles = visible_tiles(start_m, *view, BLOCK_M, BLOCK_N)
    return (place_q, place_k), head % H, start_m, consumers, view, tiles


@gluon.jit
def _hand_over(turn, slot, barrier):
    """Whose turn it is, from one warp to a consumer; the barrier hears of it."""
    slot.store(gl.full([1], turn, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _taken_over(slot):
    """What was handed over."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _produce(descriptors, queries, loaded, turns, call, counter_ptr, PACKED: gl.constexpr):
    """Loads query tiles, and of each its key tiles one after the other, K before V."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, q_full, q_free = queries
    k_tiles, v_tiles, k_full, v_full, k_free, v_free = loaded
    heads, G, m_blocks = call[2][0], call[2][2], call[3][0]
    total = heads * m_blocks
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    rounds, before = 0, 0
    turn = gl.program_id(0)
    while turn < total:
        following = total
        if gl.num_programs(0) < total:
            following = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        places, h, start_m, _, _, tiles = _work(turn, call, BLOCK_N, CONSUMERS, PACKED)
        for consumer in gl.static_range(CONSUMERS):
            place = block_of(places[0], h, start_m + consumer * WARPGROUP_ROWS, PACKED)
            # Of what was never used the phase before the first counts as over.
            mbarrier.wait(q_free.index(consumer), rounds & 1 ^ 1)
            _hand_over(turn, turns.index(consumer), q_full.index(consumer))
            mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
            async_load(q_desc, place, q_full.index(consumer), q_tiles.index(consumer))
        for tile in range(tiles[0], tiles[3]):
            i = before + tile - tiles[0]
            stage = i % STAGES
            phase = i // STAGES & 1 ^ 1
            place = block_of(places[1], h // G, tile * BLOCK_N, PACKED)
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            async_load(k_desc, place, k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            async_load(v_desc, place, v_full.index(stage), v_tiles.index(stage))
        before += tiles[3] - tiles[0]
        rounds += 1
        turn = following
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.wait(q_free.index(consumer), rounds & 1 ^ 1)
        _hand_over(total, turns.index(consumer), q_full.index(consumer))
        mbarrier.arrive(q_full.index(consumer), count=1)


@gluon.jit
def _softmax(
    scores,
    m_i,
    qk_scale,
    offs_m,
    tile,
    tiles,
    view,
    LAYOUT: gl.constexpr,
    THRESHOLD: gl.constexpr,
):
    """P of one tile's scores, the factor for sums before it, and the new maxima, in base 2.

    A maximum that has risen by no more than the threshold stays what it was, and the factor is 1.
    """
    BLOCK_N: gl.constexpr = scores.shape[1]
    if (tile < tiles[1]) | (tile >= tiles[2]):
        offs_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(pairs_seen(offs_m, offs_n, *view), scores, -float("inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    if THRESHOLD > 0:
        m_new = gl.where(m_new <= m_i + THRESHOLD, m_i, m_new)
    # A row that has seen nothing yet subtracts 0, since -inf - -inf is NaN.
    m_pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(scores * qk_scale - m_pivot[:, None])
    return p, gl.exp2(m_i - m_pivot), m_new


@gluon.jit
def _attend(
    q,
    q_free,
    loaded,
    before,
    start_m,
    tiles,
    view,
    qk_scale,
    N,
    DTYPE: gl.constexpr,
    BESIDE: gl.constexpr,
    THRESHOLD: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Sums of weighted values, sums of weights, and maxima, of 64 queries and their key tiles.

    Of ``before`` tiles others were loaded before. BESIDE: the softmax of one tile's scores is taken
    beside the product of the weights and values of the tile before; else between products.
    THRESHOLD: by how many powers of 2 a row's maximum rises before its sums are rescaled.
    """
    k_tiles, v_tiles, k_full, v_full, k_free, v_free = loaded
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    BLOCK_DV: gl.constexpr = v_tiles.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WIDE: gl.constexpr = wide(BLOCK_DV)
    nothing = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    first, last = tiles[0], tiles[3]
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, ROWS)
    m_i = gl.full([WARPGROUP_ROWS], -float("inf"), gl.float32, ROWS)
    l_i = gl.full([WARPGROUP_ROWS], 0.0, gl.float32, ROWS)
    acc = gl.zeros([WARPGROUP_ROWS, BLOCK_DV], gl.float32, SUMS)
    if BESIDE:
        # From registers: products read less of shared memory, which takes power from them. Three
        # consumers have no registers left for it.
        q = q.load(gl.DotOperandLayout(0, SCORES, 2))
    if first < last:
        scores = start_scores(q, k_tiles, k_full, before, nothing)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(before % STAGES), count=1)
        p, alpha, m_i = _softmax(
            scores, m_i, qk_scale, offs_m, first, tiles, view, SCORES, THRESHOLD
        )
        l_i = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        for tile in range(first + 1, last):
            i = before + tile - first
            behind = (i - 1) % STAGES
            if BESIDE:
                scores = start_scores(q, k_tiles, k_full, i, nothing)
                acc = add_product(acc, weights, v_tiles, v_full, i - 1)
                scores = warpgroup_mma_wait(1, deps=(scores,))
            else:
                acc = add_product(acc, weights, v_tiles, v_full, i - 1)
                scores = start_scores(q, k_tiles, k_full, i, nothing)
                scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))
                mbarrier.arrive(v_free.index(behind), count=1)
            mbarrier.arrive(k_free.index(i % STAGES), count=1)
            p, alpha, m_i = _softmax(
                scores, m_i, qk_scale, offs_m, tile, tiles, view, SCORES, THRESHOLD
            )
            l_i = l_i * alpha + gl.sum(p, 1)
            risen = gl.min(alpha, 0) < 1.0 if THRESHOLD > 0 else True
            if BESIDE:
                # It is over since before the product. But ptxas moves no instruction past it: the
                # next wait it puts first, and the softmax behind the product, not beside it.
                mbarrier.wait(v_full.index(behind), (i - 1) // STAGES & 1)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_free.index(behind), count=1)
            if risen:
                acc = acc * gl.convert_layout(alpha, ROWS_OF_SUMS)[:, None]
            weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        # The queries of the next turn come while this one ends.
        mbarrier.arrive(q_free, count=1)
        i = before + last - 1 - first
        # The copy has zeros past the tensor's last key.
        if (PACKED | (view[1] < N)) & (last * BLOCK_N > view[1]):
            mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
            keys = (last - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
            zero_rows(matrix(v_tiles, i % STAGES), keys < view[1], WIDE)
        acc = add_product(acc, weights, v_tiles, v_full, i)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(i % STAGES), count=1)
    else:
        mbarrier.arrive(q_free, count=1)
    return acc, gl.convert_layout(l_i, ROWS_OF_SUMS), gl.convert_layout(m_i, ROWS_OF_SUMS)


@gluon.jit
def _pass_by(q_free, loaded, before, tiles):
    """Leaves the key tiles of others to them."""
    k_tiles, _, k_full, v_full, k_free, v_free = loaded
    STAGES: gl.constexpr = k_tiles.shape[0]
    mbarrier.arrive(q_free, count=1)
    for i in range(before, before + tiles[3] - tiles[0]):
        stage = i % STAGES
        mbarrier.wait(k_full.index(stage), i // STAGES & 1)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), i // STAGES & 1)
        mbarrier.arrive(v_free.index(stage), count=1)


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    queries,
    loaded,
    turns,
    outputs,
    call,
    THRESHOLD: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Attends from 64 rows of each query tile to its key tiles."""
    q_tiles, q_full, q_free = queries
    out_ptr, lse_ptr = outputs
    _, _, sizes, of_head, _, qk_scale = call
    heads, H, _, M, N, rows_q, _, Dv = sizes
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    BLOCK_N: gl.constexpr = loaded[0].shape[3]
    BLOCK_DV: gl.constexpr = loaded[1].shape[4]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    WIDE: gl.constexpr = wide(BLOCK_DV)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    q = matrix(q_tiles, consumer)
    rounds, before = 0, 0
    mbarrier.wait(q_full.index(consumer), 0)
    turn = _taken_over(turns.index(consumer))
    while turn < heads * of_head[0]:
        places, h, start_m, consumers, view, tiles = _work(turn, call, BLOCK_N, CONSUMERS, PACKED)
        if consumer < consumers:
            start_m += consumer * WARPGROUP_ROWS
            acc, l_i, m_i = _attend(
                q, q_free.index(consumer), loaded, before, start_m, tiles, view, qk_scale, N,
                DTYPE, CONSUMERS == 2, THRESHOLD, PACKED,
            )  # fmt: skip
            offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, SUMS))
            out, lse = normalised(acc, l_i, m_i, (l_i > 0) & (offs_m < view[0]))
            place = places[0]
            first, end = stored_rows(place, h, H, place, M, view[0], rows_q, PACKED)
            gl.store(lse_ptr + (first + offs_m), lse, mask=offs_m < end)
            out = gl.convert_layout(out.to(DTYPE), WIDE)
            rows = start_m + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, WIDE))
            columns = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, WIDE))
            store_rows(out_ptr, first, end, rows, columns, out, Dv, BLOCK_DV, 1)
        else:
            _pass_by(q_free.index(consumer), loaded, before, tiles)
        before += tiles[3] - tiles[0]
        rounds += 1
        mbarrier.wait(q_full.index(consumer), rounds & 1)
        turn = _taken_over(turns.index(consumer))


@gluon.jit(
    do_not_specialize=[
        "heads", "H", "G", "M", "N", "rows_q", "rows_k", "Dv", "m_blocks", "narrow", "entries",
        "window_left", "window_right", "sm_scale_bits",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr", "lse_ptr", "seqlens_q_ptr", "seqlens_k_ptr", "counter_ptr",
    ],
)  # fmt: skip
def hopper_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    counter_ptr,
    heads: gl.int32,
    H: gl.int32,
    G: gl.int32,
    M: gl.int32,
    N: gl.int32,
    rows_q: gl.int32,
    rows_k: gl.int32,
    Dv: gl.int32,
    m_blocks: gl.int32,
    narrow: gl.int32,
    entries: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    sm_scale_bits: gl.int64,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    THRESHOLD: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, of ``heads`` = B H heads.

    q, k, v as descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), in blocks of WARPGROUP_ROWS
    queries or one key tile, and all columns, with zeros past the tensors' ends. A head's rows are
    in ``m_blocks`` tiles of as many blocks as there are consumers, the first ``narrow`` of them of
    one less. Fewer programs than there are query tiles take turns, as they count them in
    ``counter``, an int32 of 0: one loads its next tiles while it ends the one before. Else that is
    not touched.

    PACKED: out (H,rows_q,Dv) and lse (H,rows_q), descriptors of (1,H,rows_q,D), (1,Hk,rows_k,D),
    (1,Hk,rows_k,Dv), as of ``forward_kernel``. Where there are ``entries``, of ``heads`` = H each
    has the tiles of so many sequences, as of ``sequence_of_tile``, and none is narrow.
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    qk_scale = base2_scale(scale_from_bits(sm_scale_bits), gl.float32, 0)
    sizes = (heads, H, G, M, N, rows_q, rows_k, Dv)
    of_head, windows = (m_blocks, narrow, entries), (window_left, window_right)
    call = (seqlens_q_ptr, seqlens_k_ptr, sizes, of_head, windows, qk_scale)
    turns = gl.allocate_shared_memory(
        gl.int32, [CONSUMERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_tiles = gl.allocate_shared_memory(
        q_desc.dtype, [CONSUMERS, 1, 1, WARPGROUP_ROWS, BLOCK_D], q_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout
    )
    v_tiles = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout
    )
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for consumer in gl.static_range(CONSUMERS):
        # A tile, and whose turn it is.
        mbarrier.init(q_full.index(consumer), count=2)
        mbarrier.init(q_free.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # All consumers leave it.
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    fence_async_shared()
    queries = (q_tiles, q_full, q_free)
    loaded = (k_tiles, v_tiles, k_full, v_full, k_free, v_free)
    outputs, descriptors = (out_ptr, lse_ptr), (q_desc, k_desc, v_desc)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, queries, loaded, turns, outputs, call, THRESHOLD, PACKED)),
                (_consume, (1, queries, loaded, turns, outputs, call, THRESHOLD, PACKED)),
                (_produce, (descriptors, queries, loaded, turns, call, counter_ptr, PACKED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, queries, loaded, turns, outputs, call, THRESHOLD, PACKED)),
                (_consume, (1, queries, loaded, turns, outputs, call, THRESHOLD, PACKED)),
                (_consume, (2, queries, loaded, turns, outputs, call, THRESHOLD, PACKED)),
                (_produce, (descriptors, queries, loaded, turns, call, counter_ptr, PACKED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
