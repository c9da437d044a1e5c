"""Forward on Hopper: TMA copies, asynchronous products, several consumers and one producer.

Each consumer owns 64 rows of a query tile. There are two consumers, or three if values are narrow
and their sums leave registers for a third. While the tensor cores multiply for one consumer,
another computes its softmax; with two consumers, each also overlaps its softmax with its own
product of P and V. The producer loads keys and values for all consumers, as far ahead as there are
stages, and begins with the next query tile while the current one ends. The sums have the order of
the portable ``forward`` kernel.

Source: FlashAttention-3 (arXiv:2407.08608), Algorithms 1 and 2.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.common.addressing import store_rows, stored_rows
from fa_kernels.kernels.common.score_mod import base2_scale
from fa_kernels.kernels.common.seqlen_info import Batch, seqlen_info, sequence_of_tile
from fa_kernels.kernels.common.softmax import (
    SoftmaxState,
    normalised,
    scale_from_bits,
    with_sink,
)
from fa_kernels.kernels.common.tile_ranges import is_edge, tile_of_head
from fa_kernels.kernels.hopper.pipeline import (
    WARPGROUP_ROWS,
    Pipeline,
    accumulator_layout,
    add_product,
    async_load,
    block_at,
    key_tiles,
    load_stage,
    make_barriers,
    make_tiles,
    mask_of,
    matrix,
    operand_layout,
    release,
    start_scores,
    thread_barrier,
    tile_at,
    visible,
    wait_free,
    wait_full,
    wide,
    zero_rows,
)

__all__ = ["hopper_forward_kernel"]


class _Descriptors(NamedTuple):
    """Descriptors of the inputs."""

    q: Any
    k: Any
    v: Any


class _Outputs(NamedTuple):
    """Pointers to the outputs, the columns of out, and the sinks (H,), or a placeholder."""

    out_ptr: Any
    lse_ptr: Any
    Dv: Any
    sinks_ptr: Any
    stride_sink: Any


class _Call(NamedTuple):
    """The arguments of all programs: sequences, counts of heads and tiles, window and scale."""

    batch: Any
    heads: Any
    H: Any
    G: Any
    m_blocks: Any
    narrow: Any
    together: Any
    entries: Any
    window_left: Any
    window_right: Any
    qk_scale: Any


class _QueryTile(NamedTuple):
    """A query tile: its head, first row, consumers, sequences, mask and ``TileRange``."""

    h: Any
    start_m: Any
    consumers: Any
    info: Any
    mask: Any
    tiles: Any


class _Shared(NamedTuple):
    """Shared memory: queries and a work-tile index per consumer, and pipelines of K and V.

    ``q_full`` ends a phase when both the queries and the index have arrived.
    """

    work_tiles: Any
    q_tiles: Any
    q_full: Any
    q_free: Any
    k_pipe: Any
    v_pipe: Any


class _State(NamedTuple):
    """The online softmax of 64 rows.

    ``acc`` has sums of weighted values, ``l_i`` sums of weights, and ``m_i`` maxima in base 2.
    ``weights`` belongs to the last tile, which is not in ``acc`` yet.
    """

    acc: Any
    l_i: Any
    m_i: Any
    weights: Any


@gluon.jit
def _tile_of_work(work, call, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, VARLEN: gl.constexpr):
    """The query tile of a work-tile index."""
    BLOCK_M: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    block, head = tile_of_head(work, call.m_blocks, call.heads, call.together)
    # Late query tiles come first: under causal masking they take longest.
    m_block = call.m_blocks - 1 - block
    b = head // call.H
    if VARLEN:
        if call.entries > 0:
            b, m_block = sequence_of_tile(
                m_block, call.batch.seqlens_q_ptr, call.entries, call.batch.total_q, BLOCK_M
            )
    consumers = CONSUMERS
    # equivalent: A consumer more writes rows of the next tile, the same bits as that tile writes.
    if m_block < call.narrow:
        consumers = CONSUMERS - 1
    start_m = (m_block * CONSUMERS - min(m_block, call.narrow)) * WARPGROUP_ROWS
    info = seqlen_info(call.batch, b, VARLEN)
    mask = mask_of(info, call.window_left, call.window_right)
    # The range of a wide tile: a narrow one may visit a key tile that is hidden from all its rows.
    tiles = key_tiles(start_m, mask, BLOCK_M, BLOCK_N)
    return _QueryTile(head % call.H, start_m, consumers, info, mask, tiles)


@gluon.jit
def _publish(work, slot, barrier):
    """Publishes the work-tile index to a consumer, from one warp, then arrives on the barrier."""
    slot.store(gl.full([1], work, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _read(slot):
    """Reads the work-tile index."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _produce(inputs, shared, call, counter_ptr, VARLEN: gl.constexpr):
    """Loads the query tiles of a program, and for each its key tiles in order, K before V."""
    total = call.heads * call.m_blocks
    CONSUMERS: gl.constexpr = shared.q_tiles.shape[0]
    BLOCK_N: gl.constexpr = inputs.k.block_type.shape[2]
    rounds, before = 0, 0
    work = gl.program_id(0)
    while work < total:
        tile = _tile_of_work(work, call, BLOCK_N, CONSUMERS, VARLEN)
        for consumer in gl.static_range(CONSUMERS):
            start_m = tile.start_m + consumer * WARPGROUP_ROWS
            place = block_at(tile.info.offset_q, tile.h, start_m, VARLEN)
            full = shared.q_full.index(consumer)
            # Passes in the first round: the phase before the first counts as complete.
            mbarrier.wait(shared.q_free.index(consumer), rounds & 1 ^ 1)
            _publish(work, shared.work_tiles.index(consumer), full)
            mbarrier.expect(full, inputs.q.block_type.nbytes)
            async_load(inputs.q, place, full, shared.q_tiles.index(consumer))
        for key_tile in range(tile.tiles.lo, tile.tiles.hi):
            i = before + key_tile - tile.tiles.lo
            place = block_at(tile.info.offset_k, tile.h // call.G, key_tile * BLOCK_N, VARLEN)
            wait_free(shared.k_pipe, i)
            load_stage(shared.k_pipe, i, inputs.k, place)
            wait_free(shared.v_pipe, i)
            load_stage(shared.v_pipe, i, inputs.v, place)
        before += tile.tiles.hi - tile.tiles.lo
        rounds += 1
        following = total
        # Not before the last key tile: a program with a long tile would hold another one back.
        if gl.num_programs(0) < total:
            following = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        work = following
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.wait(shared.q_free.index(consumer), rounds & 1 ^ 1)
        _publish(total, shared.work_tiles.index(consumer), shared.q_full.index(consumer))
        mbarrier.arrive(shared.q_full.index(consumer), count=1)


@gluon.jit
def _softmax(scores, m_i, qk_scale, offs_m, key_tile, tile):
    """Returns P of a tile's scores, the factor that rescales earlier sums, and the new maxima.

    Maxima are in base 2.
    """
    BLOCK_N: gl.constexpr = scores.shape[1]
    if is_edge(key_tile, tile.tiles):
        COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BLOCK_N))
        offs_n = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, COLUMNS)
        scores = gl.where(visible(offs_m, offs_n, tile.mask), scores, -float("inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    # A row that has seen no key yet subtracts 0, since -inf - -inf is NaN.
    m_pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(scores * qk_scale - m_pivot[:, None])
    return p, gl.exp2(m_i - m_pivot), m_new


@gluon.jit
def _first_tile(q, shared, before, offs_m, tile, qk_scale, DTYPE: gl.constexpr):
    """The ``_State`` after the scores of a query tile's first key tile."""
    keys, values = shared.k_pipe, shared.v_pipe
    BLOCK_N: gl.constexpr = keys.tiles.shape[3]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    SCORES: gl.constexpr = accumulator_layout(BLOCK_N)
    m_i = gl.full([WARPGROUP_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([WARPGROUP_ROWS, BLOCK_DV], gl.float32, accumulator_layout(BLOCK_DV))
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    scores = start_scores(q, keys, before, zeros)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release(keys, before)
    p, _, m_i = _softmax(scores, m_i, qk_scale, offs_m, tile.tiles.lo, tile)
    weights = gl.convert_layout(p.to(DTYPE), operand_layout(BLOCK_DV))
    return _State(acc, gl.sum(p, 1), m_i, weights)


@gluon.jit
def _next_tile(
    state, q, shared, i, offs_m, key_tile, tile, qk_scale, OVERLAP: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """The ``_State`` after the scores of one more key tile, the i-th of the pipelines.

    With OVERLAP, the softmax of its scores runs beside the product of the previous tile's weights
    and values; else it runs between products.
    """
    keys, values = shared.k_pipe, shared.v_pipe
    BLOCK_N: gl.constexpr = keys.tiles.shape[3]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    SCORES: gl.constexpr = accumulator_layout(BLOCK_N)
    ROWS_OF_SUMS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_DV))
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    acc = state.acc
    if OVERLAP:
        scores = start_scores(q, keys, i, zeros)
        acc = add_product(acc, state.weights, values, i - 1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        acc = add_product(acc, state.weights, values, i - 1)
        scores = start_scores(q, keys, i, zeros)
        scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))
        release(values, i - 1)
    release(keys, i)
    p, alpha, m_i = _softmax(scores, state.m_i, qk_scale, offs_m, key_tile, tile)
    l_i = state.l_i * alpha + gl.sum(p, 1)
    if OVERLAP:
        # This phase is already complete, but ptxas moves no exponential past a wait on an mbarrier.
        # Without this wait, ptxas 12.8 and 12.9 (Triton 3.6 and 3.9) hoist the wait for the product
        # above half of the exponentials or more, which then run after it instead of beside it.
        wait_full(values, i - 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(values, i - 1)
    acc = acc * gl.convert_layout(alpha, ROWS_OF_SUMS)[:, None]
    weights = gl.convert_layout(p.to(DTYPE), operand_layout(BLOCK_DV))
    return _State(acc, l_i, m_i, weights)


@gluon.jit
def _last_product(state, values, i, tile, N, VARLEN: gl.constexpr):
    """Adds the last key tile's weighted values, the i-th of the pipeline, to ``acc``."""
    BLOCK_N: gl.constexpr = values.tiles.shape[3]
    WIDE: gl.constexpr = wide(values.tiles.shape[4])
    seqlen_k, last = tile.mask.seqlen_k, tile.tiles.hi
    # The TMA copy zeros only the keys past the end of the tensor.
    if (VARLEN | (seqlen_k < N)) & (last * BLOCK_N > seqlen_k):
        wait_full(values, i)
        offs_n = (last - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
        zero_rows(tile_at(values, i), offs_n < seqlen_k, WIDE)
    acc = add_product(state.acc, state.weights, values, i)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(values, i)
    return acc


@gluon.jit
def _attend(
    consumer: gl.constexpr, shared, before, tile, call, DTYPE: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """Returns ``acc``, ``l_i`` and ``m_i`` of a consumer's 64 queries after all their key tiles.

    ``before`` counts the earlier tiles of the pipelines.
    """
    BLOCK_DV: gl.constexpr = shared.v_pipe.tiles.shape[4]
    OVERLAP: gl.constexpr = shared.q_tiles.shape[0] == 2
    SCORES: gl.constexpr = accumulator_layout(shared.k_pipe.tiles.shape[3])
    SUMS: gl.constexpr = accumulator_layout(BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    start_m = tile.start_m + consumer * WARPGROUP_ROWS
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, ROWS)
    m_i = gl.full([WARPGROUP_ROWS], -float("inf"), gl.float32, ROWS)
    l_i = gl.full([WARPGROUP_ROWS], 0.0, gl.float32, ROWS)
    acc = gl.zeros([WARPGROUP_ROWS, BLOCK_DV], gl.float32, SUMS)
    q = matrix(shared.q_tiles, consumer)
    if OVERLAP:
        # Queries in registers spare reads of shared memory, which cost power. With three consumers
        # there are no registers for them.
        q = q.load(gl.DotOperandLayout(0, SCORES, 2))
    first, last = tile.tiles.lo, tile.tiles.hi
    if first < last:
        state = _first_tile(q, shared, before, offs_m, tile, call.qk_scale, DTYPE)
        for key_tile in range(first + 1, last):
            state = _next_tile(
                state, q, shared, before + key_tile - first, offs_m, key_tile, tile, call.qk_scale,
                OVERLAP, DTYPE,
            )  # fmt: skip
        # The producer loads the next tile's queries while this one ends.
        mbarrier.arrive(shared.q_free.index(consumer), count=1)
        i = before + last - 1 - first
        acc = _last_product(state, shared.v_pipe, i, tile, call.batch.max_seqlen_k, VARLEN)
        l_i, m_i = state.l_i, state.m_i
    else:
        mbarrier.arrive(shared.q_free.index(consumer), count=1)
    ROWS_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    return acc, gl.convert_layout(l_i, ROWS_OF_SUMS), gl.convert_layout(m_i, ROWS_OF_SUMS)


@gluon.jit
def _skip(consumer: gl.constexpr, shared, before, tiles):
    """Releases a query tile's stages for a consumer that has no rows of it."""
    mbarrier.arrive(shared.q_free.index(consumer), count=1)
    for i in range(before, before + tiles.hi - tiles.lo):
        wait_full(shared.k_pipe, i)
        release(shared.k_pipe, i)
        wait_full(shared.v_pipe, i)
        release(shared.v_pipe, i)


@gluon.jit
def _write(
    consumer: gl.constexpr, acc, l_i, m_i, tile, outputs, call, VARLEN: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Writes out and lse of a consumer's 64 queries."""
    BLOCK_DV: gl.constexpr = acc.shape[1]
    WIDE: gl.constexpr = wide(BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_DV))
    seqlen_q, offset_q = tile.info.seqlen_q, tile.info.offset_q
    start_m = tile.start_m + consumer * WARPGROUP_ROWS
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, ROWS)
    if HAS_SINKS:
        sink = gl.load(outputs.sinks_ptr + (tile.h % call.H).to(gl.int64) * outputs.stride_sink)
        state = with_sink(SoftmaxState(acc, l_i, m_i), sink.to(m_i.dtype))
        acc, l_i, m_i = state.acc, state.l, state.m
    out, lse = normalised(acc, l_i, m_i, (l_i > 0) & (offs_m < seqlen_q))
    first, end = stored_rows(
        offset_q, tile.h, call.H, offset_q, call.batch.max_seqlen_q, seqlen_q, call.batch.total_q,
        VARLEN,
    )  # fmt: skip
    gl.store(outputs.lse_ptr + (first + offs_m), lse, mask=offs_m < end)
    out = gl.convert_layout(out.to(outputs.out_ptr.dtype.element_ty), WIDE)
    rows = start_m + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, WIDE))
    store_rows(outputs.out_ptr, first, end, rows, columns, out, outputs.Dv, True)


@gluon.jit
def _consume(
    consumer: gl.constexpr, shared, outputs, call, VARLEN: gl.constexpr, HAS_SINKS: gl.constexpr
):
    """Attends from a consumer's 64 rows of each query tile to its key tiles."""
    CONSUMERS: gl.constexpr = shared.q_tiles.shape[0]
    BLOCK_N: gl.constexpr = shared.k_pipe.tiles.shape[3]
    DTYPE: gl.constexpr = outputs.out_ptr.dtype.element_ty
    rounds, before = 0, 0
    mbarrier.wait(shared.q_full.index(consumer), 0)
    work = _read(shared.work_tiles.index(consumer))
    while work < call.heads * call.m_blocks:
        tile = _tile_of_work(work, call, BLOCK_N, CONSUMERS, VARLEN)
        if consumer < tile.consumers:
            acc, l_i, m_i = _attend(consumer, shared, before, tile, call, DTYPE, VARLEN)
            _write(consumer, acc, l_i, m_i, tile, outputs, call, VARLEN, HAS_SINKS)
        else:
            _skip(consumer, shared, before, tile.tiles)
        before += tile.tiles.hi - tile.tiles.lo
        rounds += 1
        mbarrier.wait(shared.q_full.index(consumer), rounds & 1)
        work = _read(shared.work_tiles.index(consumer))


@gluon.jit
def _allocate(inputs, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """The ``_Shared`` of a program, with its barriers initialised."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_tiles = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], PLAIN)
    q_tiles = make_tiles(inputs.q, CONSUMERS)
    k_tiles, v_tiles = make_tiles(inputs.k, STAGES), make_tiles(inputs.v, STAGES)
    q_full, q_free = make_barriers(CONSUMERS), make_barriers(CONSUMERS)
    k_full, v_full = make_barriers(STAGES), make_barriers(STAGES)
    k_free, v_free = make_barriers(STAGES), make_barriers(STAGES)
    for consumer in gl.static_range(CONSUMERS):
        # Two arrivals: the copy of the queries, and the work-tile index.
        mbarrier.init(q_full.index(consumer), count=2)
        mbarrier.init(q_free.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # All consumers release a stage.
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    fence_async_shared()
    k_pipe, v_pipe = Pipeline(k_tiles, k_full, k_free), Pipeline(v_tiles, v_full, v_free)
    return _Shared(work_tiles, q_tiles, q_full, q_free, k_pipe, v_pipe)


@gluon.jit(
    do_not_specialize=[
        "heads", "H", "G", "M", "N", "total_q", "total_k", "Dv", "m_blocks", "narrow", "together",
        "entries", "window_left", "window_right", "sm_scale_bits", "stride_sink",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr", "lse_ptr", "seqlens_q_ptr", "seqlens_k_ptr", "counter_ptr", "sinks_ptr",
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
    total_q: gl.int32,
    total_k: gl.int32,
    Dv: gl.int32,
    m_blocks: gl.int32,
    narrow: gl.int32,
    together: gl.int32,
    entries: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    sm_scale_bits: gl.int64,
    sinks_ptr,
    stride_sink: gl.int64,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    VARLEN: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Writes out (B,H,M,Dv) and lse (B,H,M), both contiguous, of ``heads`` = B H heads.

    q, k, v are descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), in blocks of WARPGROUP_ROWS
    queries or one key tile, and all columns, with zeros past the tensors' ends. A head has
    ``m_blocks`` tiles of CONSUMERS blocks; the first ``narrow`` tiles have one block less. Their
    order is that of ``tile_of_head`` with ``together``. With fewer programs than query tiles, a
    program takes its next tile from ``counter``, an int32 that starts at 0, and loads it while the
    current one ends. Else the counter is not accessed.

    VARLEN: out is (H,total_q,Dv) and lse (H,total_q), as in ``forward_kernel``; the descriptors are
    of (1,H,total_q,D), (1,Hk,total_k,D), (1,Hk,total_k,Dv). If ``entries`` is not 0, ``heads`` is
    H, each head has the tiles of ``entries`` sequences (see ``sequence_of_tile``), and no tile is
    narrow.

    HAS_SINKS: as in ``forward_kernel``.
    """
    inputs = _Descriptors(q=q_desc, k=k_desc, v=v_desc)
    outputs = _Outputs(
        out_ptr=out_ptr, lse_ptr=lse_ptr, Dv=Dv, sinks_ptr=sinks_ptr, stride_sink=stride_sink
    )
    batch = Batch(
        seqlens_q_ptr=seqlens_q_ptr, seqlens_k_ptr=seqlens_k_ptr, max_seqlen_q=M, max_seqlen_k=N,
        total_q=total_q, total_k=total_k,
    )  # fmt: skip
    qk_scale = base2_scale(scale_from_bits(sm_scale_bits), gl.float32, 0)
    call = _Call(
        batch=batch, heads=heads, H=H, G=G, m_blocks=m_blocks, narrow=narrow, together=together,
        entries=entries, window_left=window_left, window_right=window_right, qk_scale=qk_scale,
    )  # fmt: skip
    shared = _allocate(inputs, CONSUMERS, STAGES)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, shared, outputs, call, VARLEN, HAS_SINKS)),
                (_consume, (1, shared, outputs, call, VARLEN, HAS_SINKS)),
                (_produce, (inputs, shared, call, counter_ptr, VARLEN)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, outputs, call, VARLEN, HAS_SINKS)),
                (_consume, (1, shared, outputs, call, VARLEN, HAS_SINKS)),
                (_consume, (2, shared, outputs, call, VARLEN, HAS_SINKS)),
                (_produce, (inputs, shared, call, counter_ptr, VARLEN)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
