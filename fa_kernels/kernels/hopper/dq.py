"""dq on Hopper: TMA copies, asynchronous products, two consumers and one producer.

Each consumer owns 64 rows of a query tile. Their queries and dout stay in shared memory while it
visits the key tiles. It issues the product of dS and keys of one tile together with scores and dP
of the next. It computes P and dS between products, while the other consumer multiplies. The sums
have the order of the portable ``dq`` kernel.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.common.addressing import scratch_row, store_rows, stored_rows
from fa_kernels.kernels.common.score_mod import base2_scale
from fa_kernels.kernels.common.seqlen_info import Batch, seqlen_info, sequence_of_tile
from fa_kernels.kernels.common.softmax import scale_from_bits
from fa_kernels.kernels.common.tile_ranges import is_edge
from fa_kernels.kernels.hopper.pipeline import (
    WARPGROUP_ROWS,
    PartialSums,
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
    partial_rows,
    partition_of,
    release,
    signal,
    start_scores,
    steps_of,
    sums_of_consumer,
    tile_at,
    visible,
    wait_for_signal,
    wait_free,
    wait_full,
    wide,
    zero_rows,
)

__all__ = ["hopper_dq_kernel"]


class _Descriptors(NamedTuple):
    """Descriptors of the inputs."""

    q: Any
    k: Any
    v: Any
    dout: Any


class _Shared(NamedTuple):
    """Shared memory: resident queries and dout of both consumers, and pipelines of K and V.

    The two pipelines share the barriers ``free``, because keys are in use for longer than values.
    """

    q_tiles: Any
    do_tiles: Any
    rows_full: Any
    k_pipe: Any
    v_pipe: Any


class _QueryTile(NamedTuple):
    """The query tile of a program, its ``TileRange``, and its own key tiles [first, last)."""

    h: Any
    start_m: Any
    tiles: Any
    first: Any
    last: Any


class _Rows(NamedTuple):
    """Global memory: lse2 and delta from ``row`` on, and ``end`` rows of dq from ``first`` on."""

    lse2_ptr: Any
    delta_ptr: Any
    row: Any
    dq_ptr: Any
    first: Any
    end: Any
    D: Any


class _Scales(NamedTuple):
    """The softmax scale, and the scale of scores to base 2."""

    qk_scale: Any
    sm_scale: Any


@gluon.jit
def _produce(inputs, shared, tile, info, G, VARLEN: gl.constexpr):
    """Loads queries and dout of both consumers, then the program's key tiles, K before V."""
    BLOCK_N: gl.constexpr = inputs.k.block_type.shape[2]
    of_rows: gl.constexpr = inputs.q.block_type.nbytes + inputs.dout.block_type.nbytes
    if tile.first < tile.last:
        for half in gl.static_range(2):
            place = block_at(info.offset_q, tile.h, tile.start_m + half * WARPGROUP_ROWS, VARLEN)
            full = shared.rows_full.index(half)
            mbarrier.expect(full, of_rows)
            async_load(inputs.q, place, full, shared.q_tiles.index(half))
            async_load(inputs.dout, place, full, shared.do_tiles.index(half))
    for key_tile in range(tile.first, tile.last):
        i = key_tile - tile.first
        place = block_at(info.offset_k, tile.h // G, key_tile * BLOCK_N, VARLEN)
        wait_free(shared.k_pipe, i)
        load_stage(shared.k_pipe, i, inputs.k, place)
        load_stage(shared.v_pipe, i, inputs.v, place)


@gluon.jit
def _zero_padding(keys, i, key_tile, seqlen_k, N, VARLEN: gl.constexpr):
    """Clears padding in a key tile, the i-th of the pipeline, before products read it.

    dS of padding is 0, but 0 times NaN is NaN. The TMA copy zeros only the keys past the end of the
    tensor.
    """
    BLOCK_N: gl.constexpr = keys.tiles.shape[3]
    WIDE: gl.constexpr = wide(keys.tiles.shape[4])
    if (VARLEN | (seqlen_k < N)) & ((key_tile + 1) * BLOCK_N > seqlen_k):
        wait_full(keys, i)
        offs_n = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
        zero_rows(tile_at(keys, i), offs_n < seqlen_k, WIDE)


@gluon.jit
def _compute_ds(p, dp, delta, offs_m, key_tile, tiles, mask):
    """dS of one key tile."""
    BLOCK_N: gl.constexpr = p.shape[1]
    ds = p * (dp - delta[:, None])
    if is_edge(key_tile, tiles):
        COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BLOCK_N))
        offs_n = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, COLUMNS)
        # A product with p = 0 would not do: p of a hidden key and dp of a hidden v can be infinite.
        ds = gl.where(visible(offs_m, offs_n, mask), ds, 0.0)
    return ds


@gluon.jit
def _accumulate(
    dq,
    half: gl.constexpr,
    shared,
    tile,
    mask,
    offs_m,
    lse2,
    delta,
    qk_scale,
    N,
    VARLEN: gl.constexpr,
):
    """Adds the program's key tiles, of which there is at least one, to dq, without sm_scale."""
    keys, values = shared.k_pipe, shared.v_pipe
    BLOCK_N: gl.constexpr = keys.tiles.shape[3]
    SCORES: gl.constexpr = accumulator_layout(BLOCK_N)
    LEFT: gl.constexpr = operand_layout(keys.tiles.shape[4])
    DTYPE: gl.constexpr = keys.tiles.dtype
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    q, dout = matrix(shared.q_tiles, half), matrix(shared.do_tiles, half)
    mbarrier.wait(shared.rows_full.index(half), 0)
    _zero_padding(keys, 0, tile.first, mask.seqlen_k, N, VARLEN)
    scores = start_scores(q, keys, 0, zeros)
    dp = start_scores(dout, values, 0, zeros)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p = gl.exp2(scores * qk_scale - lse2[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = _compute_ds(p, dp, delta, offs_m, tile.first, tile.tiles, mask)
    left = gl.convert_layout(ds.to(DTYPE), LEFT)
    for key_tile in range(tile.first + 1, tile.last):
        i = key_tile - tile.first
        dq = add_product(dq, left, keys, i - 1)
        _zero_padding(keys, i, key_tile, mask.seqlen_k, N, VARLEN)
        scores = start_scores(q, keys, i, zeros)
        # dP starts later, because the registers do not hold three products at once.
        dq = warpgroup_mma_wait(1, deps=(dq,))
        release(keys, i - 1)
        dp = start_scores(dout, values, i, zeros)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * qk_scale - lse2[:, None])
        # This phase is already complete, but ptxas moves no exponential past a wait on an mbarrier.
        # Without this wait, ptxas 12.8 and 12.9 (Triton 3.6 and 3.9) hoist the wait for the product
        # above three quarters of the exponentials, which then run after it instead of beside it.
        wait_full(values, i)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = _compute_ds(p, dp, delta, offs_m, key_tile, tile.tiles, mask)
        left = gl.convert_layout(ds.to(DTYPE), LEFT)
    i = tile.last - 1 - tile.first
    dq = add_product(dq, left, keys, i)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    release(keys, i)
    return dq


@gluon.jit
def _write(dq, start_m, lse2, sm_scale, rows, BLOCK_D: gl.constexpr):
    """Writes dq of 64 rows."""
    SUMS: gl.constexpr = accumulator_layout(BLOCK_D)
    WIDE: gl.constexpr = wide(BLOCK_D)
    # Up to here, dq of rows without a visible key and of padding rows is undefined.
    live = gl.convert_layout(lse2, gl.SliceLayout(1, SUMS)) != float("inf")
    dq = gl.where(live[:, None], dq * sm_scale, 0.0)
    dq = gl.convert_layout(dq.to(rows.dq_ptr.dtype.element_ty), WIDE)
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
    store_rows(rows.dq_ptr, rows.first, rows.end, offs_m, columns, dq, rows.D, True)


@gluon.jit
def _consume(half: gl.constexpr, shared, rows, sums, tile, mask, scales, N, VARLEN: gl.constexpr):
    """Computes dq of 64 rows of the query tile.

    If programs share the tile, it also reads or stores partial sums.
    """
    BLOCK_D: gl.constexpr = shared.k_pipe.tiles.shape[4]
    SUMS: gl.constexpr = accumulator_layout(BLOCK_D)
    SCORES: gl.constexpr = accumulator_layout(shared.k_pipe.tiles.shape[3])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHAPE: gl.constexpr = [WARPGROUP_ROWS, BLOCK_D]
    start_m = tile.start_m + half * WARPGROUP_ROWS
    offs_tile = half * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, ROWS)
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, ROWS)
    sums = sums_of_consumer(sums, half, WARPGROUP_ROWS)
    dq = gl.zeros(SHAPE, gl.float32, SUMS)
    if tile.first > tile.tiles.lo:
        wait_for_signal(sums)
        dq = gl.load(partial_rows(sums, SHAPE, SUMS))
    lse2 = gl.load(rows.lse2_ptr + rows.row + offs_tile)
    delta = gl.load(rows.delta_ptr + rows.row + offs_tile)
    if tile.first < tile.last:
        dq = _accumulate(
            dq, half, shared, tile, mask, offs_m, lse2, delta, scales.qk_scale, N, VARLEN
        )  # fmt: skip
    if tile.last < tile.tiles.hi:
        gl.store(partial_rows(sums, SHAPE, SUMS), dq)
        signal(sums)
    else:
        _write(dq, start_m, lse2, scales.sm_scale, rows, BLOCK_D)


@gluon.jit
def _allocate(inputs, STAGES: gl.constexpr):
    """The ``_Shared`` of a program, with its barriers initialised."""
    q_tiles, do_tiles = make_tiles(inputs.q, 2), make_tiles(inputs.dout, 2)
    k_tiles, v_tiles = make_tiles(inputs.k, STAGES), make_tiles(inputs.v, STAGES)
    rows_full, k_full = make_barriers(2), make_barriers(STAGES)
    v_full, free = make_barriers(STAGES), make_barriers(STAGES)
    for half in gl.static_range(2):
        mbarrier.init(rows_full.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # Both consumers release a stage.
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    k_pipe, v_pipe = Pipeline(k_tiles, k_full, free), Pipeline(v_tiles, v_full, free)
    return _Shared(q_tiles, do_tiles, rows_full, k_pipe, v_pipe)


@gluon.jit(
    do_not_specialize=[
        "tiles_of_head", "entries", "H", "G", "M", "M_padded", "N", "total_q", "total_k", "D",
        "each", "shares", "window_left", "window_right", "sm_scale_bits",
    ],
    do_not_specialize_on_alignment=[
        "lse2_ptr", "delta_ptr", "dq_ptr", "sums_ptr", "signals_ptr", "seqlens_q_ptr",
        "seqlens_k_ptr",
    ],
)  # fmt: skip
def hopper_dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    sums_ptr,
    signals_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    tiles_of_head: gl.int32,
    entries: gl.int32,
    H: gl.int32,
    G: gl.int32,
    M: gl.int32,
    M_padded: gl.int32,
    N: gl.int32,
    total_q: gl.int32,
    total_k: gl.int32,
    D: gl.int32,
    each: gl.int32,
    shares: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    sm_scale_bits: gl.int64,
    STAGES: gl.constexpr,
    ROW_PADDING: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, for one query tile of one head, or for a share of its steps.

    q, k, v, dout are descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), (B,H,M,Dv), in blocks of
    WARPGROUP_ROWS queries or one key tile, and all columns, with zeros past the tensors' ends. lse2
    and delta (B,H,M_padded) come from ``bwd_preprocess_kernel``. See ``share_of`` for ``each`` and
    ``shares``. Shared tiles have partial sums (shared tiles,BLOCK_M,BLOCK_D), float32, and signals
    (shared tiles,2), int32, which start at 0.

    VARLEN: dq is (H,total_q,D); descriptors are as in ``hopper_forward_kernel``, lse2 and delta as
    in ``dq_kernel``. See ``sequence_of_tile`` for ``entries``, if it is not 0.
    """
    BLOCK_M: gl.constexpr = 2 * WARPGROUP_ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    inputs = _Descriptors(q=q_desc, k=k_desc, v=v_desc, dout=dout_desc)
    batch = Batch(
        seqlens_q_ptr=seqlens_q_ptr, seqlens_k_ptr=seqlens_k_ptr, max_seqlen_q=M, max_seqlen_k=N,
        total_q=total_q, total_k=total_k,
    )  # fmt: skip
    part = partition_of(gl.program_id(0), gl.num_programs(0), tiles_of_head, each, shares)
    # Late query tiles come first: under causal masking they take longest.
    m_block = tiles_of_head - 1 - part.block
    b = part.head // H
    h = part.head % H
    if VARLEN:
        if entries > 0:
            b, m_block = sequence_of_tile(m_block, seqlens_q_ptr, entries, total_q, BLOCK_M)
    start_m = m_block * BLOCK_M
    info = seqlen_info(batch, b, VARLEN)
    mask = mask_of(info, window_left, window_right)
    tiles = key_tiles(start_m, mask, BLOCK_M, BLOCK_N)
    steps = steps_of(part, tiles.hi - tiles.lo)
    tile = _QueryTile(
        h=h, start_m=start_m, tiles=tiles, first=tiles.lo + steps.begin, last=tiles.lo + steps.end
    )
    sums = PartialSums(
        ptr=sums_ptr, first_row=part.index.to(gl.int64) * BLOCK_M,
        signal_ptr=signals_ptr + 2 * part.index,
    )  # fmt: skip
    sm_scale = scale_from_bits(sm_scale_bits)
    scales = _Scales(
        qk_scale=base2_scale(sm_scale, gl.float32, 0), sm_scale=sm_scale.to(gl.float32)
    )
    row = scratch_row(b, h, H, info.offset_q, M_padded, ROW_PADDING, VARLEN) + start_m
    first, end = stored_rows(b, h, H, info.offset_q, M, info.seqlen_q, total_q, VARLEN)
    rows = _Rows(
        lse2_ptr=lse2_ptr, delta_ptr=delta_ptr, row=row, dq_ptr=dq_ptr, first=first, end=end, D=D
    )
    shared = _allocate(inputs, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, shared, rows, sums, tile, mask, scales, N, VARLEN)),
            (_consume, (1, shared, rows, sums, tile, mask, scales, N, VARLEN)),
            (_produce, (inputs, shared, tile, info, G, VARLEN)),
        ],
        [4, 1],
        [240, 24],
    )
