"""Forward on Hopper: copies by TMA, asynchronous products, two warpgroups of rows and one of loads.

Each of two consumers has half the rows of a query tile. While the tensor cores add P V of one key
tile, and compute the scores of the next, a consumer takes the softmax of the scores before; the
other consumer does so at another time. A producer loads the keys and values of both, as far ahead
as there are stages, and of one query tile while the one before ends. What is computed is what
``forward`` computes, in the same order of sums.

Source: FlashAttention-3 (arXiv:2407.08608), Algorithm 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.hopper_tiles import (
    HALF_ROWS,
    PROGRAMS_TOGETHER,
    async_load,
    matrix,
    thread_barrier,
    wide,
    zero_rows,
)
from fa_kernels.kernels.scores import base2_scale
from fa_kernels.kernels.tiles import (
    element_mask,
    normalised,
    scale_from_bits,
    store_rows,
    stored_rows,
    valid_lengths,
)
from fa_kernels.ranges import tile_of_head, visible_tiles

__all__ = ["hopper_forward_kernel"]


@gluon.jit
def _work(turn, call, BLOCK_N: gl.constexpr):
    """(b, h, start_m, view, key tiles) of the query tile whose turn it is."""
    seqlens_q_ptr, seqlens_k_ptr, heads, H, _, M, N, _, window_left, window_right, _ = call
    BLOCK_M: gl.constexpr = 2 * HALF_ROWS
    m_blocks = gl.cdiv(M, BLOCK_M)
    place, bh = tile_of_head(turn, m_blocks, heads, PROGRAMS_TOGETHER)
    # Late query tiles first: under causal masking they are the long ones.
    start_m = (m_blocks - 1 - place) * BLOCK_M
    b = bh // H
    seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
    view = (seqlen_q, seqlen_k, window_left, window_right)
    tiles = visible_tiles(start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N)
    return b, bh % H, start_m, view, tiles


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
def _produce(
    queries, keys, values, turns, barriers, call, total, counter_ptr, STAGES: gl.constexpr
):
    """Loads query tiles, and of each its key tiles one after the other, K before V."""
    q_desc, q_tiles = queries
    k_desc, k_tiles = keys
    v_desc, v_tiles = values
    q_full, k_full, v_full, q_free, k_free, v_free = barriers
    G = call[4]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    rounds, before = 0, 0
    turn = gl.program_id(0)
    while turn < total:
        following = total
        if gl.num_programs(0) < total:
            following = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        b, h, start_m, _, tiles = _work(turn, call, BLOCK_N)
        for half in gl.static_range(2):
            place = [b, h, start_m + half * HALF_ROWS, 0]
            # Of what was never used the phase before the first counts as over.
            mbarrier.wait(q_free.index(half), rounds & 1 ^ 1)
            _hand_over(turn, turns.index(half), q_full.index(half))
            mbarrier.expect(q_full.index(half), q_desc.block_type.nbytes)
            async_load(q_desc, place, q_full.index(half), q_tiles.index(half))
        for tile in range(tiles[0], tiles[3]):
            i = before + tile - tiles[0]
            stage = i % STAGES
            phase = i // STAGES & 1 ^ 1
            place = [b, h // G, tile * BLOCK_N, 0]
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            async_load(k_desc, place, k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            async_load(v_desc, place, v_full.index(stage), v_tiles.index(stage))
        before += tiles[3] - tiles[0]
        rounds += 1
        turn = following
    for half in gl.static_range(2):
        mbarrier.wait(q_free.index(half), rounds & 1 ^ 1)
        _hand_over(total, turns.index(half), q_full.index(half))
        mbarrier.arrive(q_full.index(half), count=1)


@gluon.jit
def _softmax(scores, m_i, qk_scale, offs_m, tile, tiles, view, LAYOUT: gl.constexpr):
    """P of one tile's scores, the factor for sums before it, and the new maxima, in base 2."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    if (tile < tiles[1]) | (tile >= tiles[2]):
        offs_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = element_mask(offs_m[:, None], offs_n[None, :], view, None)
        scores = gl.where(seen, scores, -float("inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    # A row that has seen nothing yet subtracts 0, since -inf - -inf is NaN.
    m_pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(scores * qk_scale - m_pivot[:, None])
    return p, gl.exp2(m_i - m_pivot), m_new


@gluon.jit
def _consume(
    half: gl.constexpr,
    q_tiles,
    k_tiles,
    v_tiles,
    barriers,
    turns,
    out_ptr,
    lse_ptr,
    call,
    total,
    STAGES: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Attends from half the rows of each query tile to its key tiles."""
    q_full, k_full, v_full, q_free, k_free, v_free = barriers
    _, _, _, H, _, M, N, Dv, _, _, qk_scale = call
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    BLOCK_DV: gl.constexpr = v_tiles.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WIDE: gl.constexpr = wide(BLOCK_DV)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    nothing = gl.zeros([HALF_ROWS, BLOCK_N], gl.float32, SCORES)
    q = matrix(q_tiles, half)
    rounds, before = 0, 0
    mbarrier.wait(q_full.index(half), 0)
    turn = _taken_over(turns.index(half))
    while turn < total:
        b, h, start_m, view, tiles = _work(turn, call, BLOCK_N)
        first, last = tiles[0], tiles[3]
        start_m += half * HALF_ROWS
        offs_m = start_m + gl.arange(0, HALF_ROWS, ROWS)
        m_i = gl.full([HALF_ROWS], -float("inf"), gl.float32, ROWS)
        l_i = gl.full([HALF_ROWS], 0.0, gl.float32, ROWS)
        acc = gl.zeros([HALF_ROWS, BLOCK_DV], gl.float32, SUMS)
        if first < last:
            stage = before % STAGES
            mbarrier.wait(k_full.index(stage), before // STAGES & 1)
            k_t = matrix(k_tiles, stage).permute((1, 0))
            scores = warpgroup_mma(q, k_t, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_free.index(stage), count=1)
            p, alpha, m_i = _softmax(scores, m_i, qk_scale, offs_m, first, tiles, view, SCORES)
            l_i = gl.sum(p, 1)
            weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            for tile in range(first + 1, last):
                i = before + tile - first
                stage = i % STAGES
                behind = (i - 1) % STAGES
                mbarrier.wait(k_full.index(stage), i // STAGES & 1)
                k_t = matrix(k_tiles, stage).permute((1, 0))
                scores = warpgroup_mma(q, k_t, nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(behind), (i - 1) // STAGES & 1)
                v = matrix(v_tiles, behind)
                acc = warpgroup_mma(weights, v, acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_free.index(stage), count=1)
                p, alpha, m_i = _softmax(scores, m_i, qk_scale, offs_m, tile, tiles, view, SCORES)
                l_i = l_i * alpha + gl.sum(p, 1)
                if BLOCK_DV > 64:
                    # It is over since before the product. But ptxas moves no instruction past it:
                    # the next wait it puts first, and the softmax behind the product, not beside
                    # it. With narrower values that is faster, as the other consumer multiplies.
                    mbarrier.wait(v_full.index(behind), (i - 1) // STAGES & 1)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_free.index(behind), count=1)
                acc = acc * gl.convert_layout(alpha, ROWS_OF_SUMS)[:, None]
                weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            # The queries of the next turn come while this one ends.
            mbarrier.arrive(q_free.index(half), count=1)
            before += last - first
            stage = (before - 1) % STAGES
            mbarrier.wait(v_full.index(stage), (before - 1) // STAGES & 1)
            v = matrix(v_tiles, stage)
            # The copy has zeros past the tensor's last key.
            if (view[1] < N) & (last * BLOCK_N > view[1]):
                keys = (last - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
                zero_rows(v, keys < view[1], WIDE)
            acc = warpgroup_mma(weights, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(stage), count=1)
        else:
            mbarrier.arrive(q_free.index(half), count=1)

        m_i = gl.convert_layout(m_i, ROWS_OF_SUMS)
        l_i = gl.convert_layout(l_i, ROWS_OF_SUMS)
        offs_m = start_m + gl.arange(0, HALF_ROWS, ROWS_OF_SUMS)
        out, lse = normalised(acc, l_i, m_i, (l_i > 0) & (offs_m < view[0]))
        place = stored_rows(b, h, H, b, M, view[0], M, False)
        gl.store(lse_ptr + (place[0] + offs_m), lse, mask=offs_m < place[1])
        out = gl.convert_layout(out.to(DTYPE), WIDE)
        rows = start_m + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, WIDE))
        columns = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, WIDE))
        store_rows(out_ptr, place[0], place[1], rows, columns, out, Dv, BLOCK_DV, ALIGNED)
        rounds += 1
        mbarrier.wait(q_full.index(half), rounds & 1)
        turn = _taken_over(turns.index(half))


@gluon.jit(
    do_not_specialize=[
        "heads", "H", "G", "M", "N", "Dv", "window_left", "window_right", "sm_scale_bits",
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
    Dv: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    sm_scale_bits: gl.int64,
    STAGES: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, of ``heads`` = B H heads.

    q, k, v as descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), in blocks of HALF_ROWS queries or
    one key tile, and all columns, with zeros past the tensors' ends. Fewer programs than there are
    query tiles take turns, as they count them in ``counter``, an int32 of 0: one loads its next
    tiles while it ends the one before. Else that is not touched.
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    qk_scale = base2_scale(scale_from_bits(sm_scale_bits), gl.float32, 0)
    call = (
        seqlens_q_ptr, seqlens_k_ptr, heads, H, G, M, N, Dv, window_left, window_right, qk_scale,
    )  # fmt: skip
    total = gl.cdiv(M, 2 * HALF_ROWS) * heads
    turns = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, HALF_ROWS, BLOCK_D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout
    )
    v_tiles = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout
    )
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        # A tile, and whose turn it is.
        mbarrier.init(q_full.index(half), count=2)
        mbarrier.init(q_free.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # Both consumers leave it.
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    barriers = (q_full, k_full, v_full, q_free, k_free, v_free)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, q_tiles, k_tiles, v_tiles, barriers, turns, out_ptr, lse_ptr, call, total,
                    STAGES, ALIGNED,
                ),
            ),
            (
                _consume,
                (
                    1, q_tiles, k_tiles, v_tiles, barriers, turns, out_ptr, lse_ptr, call, total,
                    STAGES, ALIGNED,
                ),
            ),
            (
                _produce,
                (
                    (q_desc, q_tiles), (k_desc, k_tiles), (v_desc, v_tiles), turns, barriers, call,
                    total, counter_ptr, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
