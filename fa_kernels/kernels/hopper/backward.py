"""dk and dv on Hopper, and with ONE_PASS dq in the same pass.

As in the portable ``dkdv`` kernel, a program has one key tile and all query tiles of a group of
heads, transposed. Each of two consumers owns half the keys. It computes the softmax of one query
tile while the tensor cores multiply dP. Then it issues dV, dK, dQ of the previous tile and the
scores of the next one in sequence, so that the other work of a tile overlaps with products.

dS goes through shared memory, because dQ sums over the keys of both consumers. Each consumer
computes half of dQ one tile later, so that it seldom waits for the other's dS. It adds dQ to sums
in global memory, in the order of its registers. A producer loads the tiles.

Source: FlashAttention-3 (arXiv:2407.08608), section 3.1 and its appendix on the backward pass.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.common.addressing import scratch_row, store_rows, stored_rows
from fa_kernels.kernels.common.block_info import nth_tile, tile_count
from fa_kernels.kernels.common.mask import pairs_seen
from fa_kernels.kernels.common.score_mod import base2_scale
from fa_kernels.kernels.common.seqlen_info import Batch, seqlen_info, sequence_of_tile
from fa_kernels.kernels.common.softmax import scale_from_bits
from fa_kernels.kernels.hopper.pipeline import (
    WARPGROUP_ROWS,
    PartialSums,
    Pipeline,
    accumulator_layout,
    add_block,
    async_load,
    block_at,
    load_stage,
    make_barriers,
    make_tiles,
    mask_of,
    matrix,
    operand_layout,
    partial_rows,
    partition_of,
    query_tiles,
    release,
    signal,
    stage_of,
    steps_of,
    sums_of_consumer,
    thread_barrier,
    tile_at,
    wait_for_signal,
    wait_free,
    wait_full,
    wide,
    zero_rows,
)

__all__ = ["hopper_backward_kernel"]

# Kinds of query tiles, in the order of the loop. Tiles with hidden pairs come first. Tiles whose
# only hidden pairs have keys past the end come next: these pairs affect dq but no other rows of dk
# and dv. All other tiles are of kind 0.
_EDGES: gl.constexpr = gl.constexpr(2)
_PAST_END: gl.constexpr = gl.constexpr(1)
# Buffers of dS: one is read, one has been written by both consumers, and one is being written by
# the consumer that is ahead.
_BUFFERS: gl.constexpr = gl.constexpr(3)


class _Descriptors(NamedTuple):
    """Descriptors of the inputs."""

    q: Any
    k: Any
    v: Any
    dout: Any


class _Shared(NamedTuple):
    """Shared memory: the key tile by halves, pipelines of queries and dout, and buffers of dS.

    The pipelines share the barriers ``free``. A stage of ``q_pipe`` is full when the tile and its
    row of lse2 have arrived, a stage of ``do_pipe`` when the tile and its row of delta have. The
    i-th query tile's dS goes through buffer (i + 1) % _BUFFERS, half by half; ``ds_full`` counts
    both consumers.
    """

    k_tiles: Any
    v_tiles: Any
    kv_full: Any
    q_pipe: Any
    do_pipe: Any
    lse2_rows: Any
    delta_rows: Any
    ds_tiles: Any
    ds_full: Any


class _KeyTile(NamedTuple):
    """The key tile of a program: its kv head, G query heads, query tiles, and own ``Steps``."""

    h_k: Any
    G: Any
    start_n: Any
    tiles: Any
    steps: Any


class _Scratch(NamedTuple):
    """The scratch of a group of heads: M_padded rows per head, from row ``first_row`` on."""

    lse2_ptr: Any
    delta_ptr: Any
    dq_ptr: Any
    first_row: Any
    M_padded: Any


class _Outputs(NamedTuple):
    """A kv head in global memory: ``end`` rows of dk (D) and dv (Dv), from row ``first`` on."""

    dk_ptr: Any
    dv_ptr: Any
    D: Any
    Dv: Any
    first: Any
    end: Any


class _Scales(NamedTuple):
    """The softmax scale, and the scale of scores to base 2."""

    qk_scale: Any
    sm_scale: Any


class _Step(NamedTuple):
    """The i-th query tile of a program: its head and row, and its place t of ``number`` of a kind.

    ``again`` is 0, computed so that the compiler cannot fold it. With a literal 0, the compiler
    keeps the addresses of all resident tiles in registers across the loop. At head_dim 128 in one
    pass, ptxas then spills 860 bytes instead of 120 (Triton 3.9), or 692 instead of 96 (Triton
    3.6).
    """

    i: Any
    stage: Any
    g: Any
    t: Any
    number: Any
    start_m: Any
    again: Any


class _Offsets(NamedTuple):
    """Offsets: keys of half a key tile, rows of a query tile from 0, keys of the half from 0."""

    n: Any
    m: Any
    wide: Any


class _State(NamedTuple):
    """Partial dk and dv, the scores of the next query tile, and the row of dq of the previous one.

    Matrices are transposed: a row belongs to a key.
    """

    dk: Any
    dv: Any
    scores: Any
    row: Any


@gluon.jit
def _copy_row(pointer, row, barrier):
    """Copies a row of float32 into shared memory, from one warp, then arrives on the barrier."""
    SIZE: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE // 32], [32], [1], [0])
    row.store(gl.load(pointer + gl.arange(0, SIZE, LAYOUT)))
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _load_query_tile(inputs, shared, i, scratch, row, place):
    """Loads the i-th tile of queries and dout, with their rows of lse2 and delta."""
    q_pipe, do_pipe = shared.q_pipe, shared.do_pipe
    stage = stage_of(q_pipe, i)
    wait_free(q_pipe, i)
    load_stage(q_pipe, i, inputs.q, place)
    _copy_row(scratch.lse2_ptr + row, shared.lse2_rows.index(stage), q_pipe.full.index(stage))
    load_stage(do_pipe, i, inputs.dout, place)
    _copy_row(scratch.delta_ptr + row, shared.delta_rows.index(stage), do_pipe.full.index(stage))


@gluon.jit
def _produce(inputs, shared, tile, info, scratch, VARLEN: gl.constexpr):
    """Loads a key tile, then the program's query tiles of G heads."""
    BLOCK_M: gl.constexpr = inputs.q.block_type.shape[2]
    total = tile.steps.end - tile.steps.begin
    if total > 0:
        of_half: gl.constexpr = inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
        full = shared.kv_full.index(0)
        mbarrier.expect(full, 2 * of_half)
        for half in gl.static_range(2):
            start_n = tile.start_n + half * WARPGROUP_ROWS
            place = block_at(info.offset_k, tile.h_k, start_n, VARLEN)
            async_load(inputs.k, place, full, shared.k_tiles.index(half))
            async_load(inputs.v, place, full, shared.v_tiles.index(half))
    before = -tile.steps.begin
    for MASKED in gl.static_range(1, -1, -1):
        count = tile_count(tile.tiles, MASKED)
        for g in range(0, tile.G):
            of_head = before + g * count
            for t in range(max(-of_head, 0), min(total - of_head, count)):
                start_m = nth_tile(t, tile.tiles, MASKED) * BLOCK_M
                place = block_at(info.offset_q, tile.h_k * tile.G + g, start_m, VARLEN)
                row = scratch.first_row + gl.cast(g, gl.int64) * scratch.M_padded + start_m
                _load_query_tile(inputs, shared, of_head + t, scratch, row, place)
        before += tile.G * count


@gluon.jit
def _zero_dead(rows, lse2_row, begin, end, mask):
    """Clears dead rows of a tile (without a visible key, or padding), which may hold anything.

    The tile lies within rows [begin, end). If all these rows see a key, it is left unchanged.
    """
    if (begin < mask.seqlen_q - mask.seqlen_k - mask.window_right) | (end > mask.seqlen_q):
        WIDE: gl.constexpr = wide(rows.shape[1])
        zero_rows(rows, lse2_row.load(gl.SliceLayout(1, WIDE)) != float("inf"), WIDE)


@gluon.jit
def _only_visible(x, offs_m, offs_n, mask):
    """Selects visible pairs. A product with 0 would not do: p or dp of a hidden pair can be inf."""
    seen = pairs_seen(
        offs_n, offs_m, mask.seqlen_k, mask.seqlen_q, mask.window_right, mask.window_left
    )
    return gl.where(seen, x, 0.0)


@gluon.jit
def _load_sums(dk_sums, dv_sums, steps, BLOCK_D: gl.constexpr):
    """Returns initial dk and dv: zeros, or partial sums of the program with earlier steps."""
    SHAPE: gl.constexpr = [WARPGROUP_ROWS, BLOCK_D]
    SUMS: gl.constexpr = accumulator_layout(BLOCK_D)
    dk = gl.zeros(SHAPE, gl.float32, SUMS)
    dv = gl.zeros(SHAPE, gl.float32, SUMS)
    if steps.begin > 0:
        wait_for_signal(dk_sums)
        dk = gl.load(partial_rows(dk_sums, SHAPE, SUMS))
        dv = gl.load(partial_rows(dv_sums, SHAPE, SUMS))
    return dk, dv


@gluon.jit
def _wait_for_first(
    half: gl.constexpr,
    offs,
    shared,
    tile,
    mask,
    end_key,
    ONE_PASS: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Waits for the key tile and the first query tile, and clears padding and dead rows."""
    BLOCK_M: gl.constexpr = shared.q_pipe.tiles.shape[3]
    WIDE: gl.constexpr = wide(shared.k_tiles.shape[4])
    mbarrier.wait(shared.kv_full.index(0), 0)
    if ONE_PASS:
        # The TMA copy zeros only the keys past the end of the tensor. p and dS of padding are
        # selected, but dQ multiplies its keys.
        start_n = tile.start_n + half * WARPGROUP_ROWS
        if (VARLEN | (mask.seqlen_k < end_key)) & (mask.seqlen_k - start_n < WARPGROUP_ROWS):
            zero_rows(matrix(shared.k_tiles, half), start_n + offs.wide < mask.seqlen_k, WIDE)
        # Stands for the dS before the first: no consumer multiplies the other's keys before this.
        mbarrier.arrive(shared.ds_full.index(0), count=1)
    wait_full(shared.q_pipe, 0)
    begin, end = tile.tiles.lo * BLOCK_M, tile.tiles.hi * BLOCK_M
    _zero_dead(tile_at(shared.q_pipe, 0), shared.lse2_rows.index(0), begin, end, mask)


@gluon.jit
def _start_scores(half: gl.constexpr, shared, q, again):
    """Starts the product of half the keys and a tile of queries."""
    BLOCK_M: gl.constexpr = q.shape[0]
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    k = matrix(shared.k_tiles, half + again)
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(half: gl.constexpr, shared, step, mask, KIND: gl.constexpr):
    """Waits for the step's dout, then starts its product with half the values."""
    BLOCK_M: gl.constexpr = shared.do_pipe.tiles.shape[3]
    dout = tile_at(shared.do_pipe, step.i)
    wait_full(shared.do_pipe, step.i)
    if KIND == _EDGES:
        lse2_row = shared.lse2_rows.index(step.stage)
        _zero_dead(dout, lse2_row, step.start_m, step.start_m + BLOCK_M, mask)
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    v = matrix(shared.v_tiles, half + step.again)
    return warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute_p(scores, shared, step, offs_m, offs_n, mask, qk_scale, KIND: gl.constexpr):
    """P of one query tile."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(scores.shape[1]))
    lse2 = shared.lse2_rows.index(step.stage).load(COLUMNS)
    p = gl.exp2(scores * qk_scale - lse2[None, :])
    if KIND == _EDGES:
        p = _only_visible(p, offs_m, offs_n, mask)
    return p


@gluon.jit
def _compute_ds(p, dp, shared, step, offs_m, offs_n, mask, KIND: gl.constexpr):
    """dS of one query tile."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(p.shape[1]))
    delta = shared.delta_rows.index(step.stage).load(COLUMNS)
    ds = p * (dp - delta[None, :])
    if KIND == _EDGES:
        ds = _only_visible(ds, offs_m, offs_n, mask)
    if KIND == _PAST_END:
        ds = gl.where((offs_n < mask.seqlen_k)[:, None], ds, 0.0)
    return ds


@gluon.jit
def _publish_ds(half: gl.constexpr, ds, shared, i):
    """Waits for both consumers' dS of the previous tile, then stores one half of the i-th dS."""
    last_made, made = i % _BUFFERS, (i + 1) % _BUFFERS
    # A consumer that has stored dS of the previous tile no longer reads dS of the third tile back,
    # which is in the buffer written here.
    mbarrier.wait(shared.ds_full.index(last_made), i // _BUFFERS & 1)
    shared.ds_tiles.index(made * 2 + half).permute((1, 0)).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(made), count=1)


@gluon.jit
def _start_dq(half: gl.constexpr, shared, buffer, again):
    """Starts the product of the dS in a buffer and all keys: one of dQ's two blocks of 64 x 64.

    The two blocks divide the columns of dQ if head_dim is 128, else its rows.
    """
    dq = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    for each in gl.static_range(2):
        left = shared.ds_tiles.index(buffer * 2 + each)
        right = matrix(shared.k_tiles, each + again)
        if shared.k_tiles.shape[4] == 128:
            right = right.slice(half * 64, 64, 1)
        else:
            left = left.slice(half * 64, 64, 0)
        dq = warpgroup_mma(left, right, dq, use_acc=each > 0, is_async=True)
    return dq


@gluon.jit
def _wait_for_next(q, shared, step, tile, mask, KIND: gl.constexpr):
    """Waits for the queries of the next step, if there is one, and clears their dead rows."""
    BLOCK_M: gl.constexpr = shared.q_pipe.tiles.shape[3]
    if step.i + 1 < tile.steps.end - tile.steps.begin:
        wait_full(shared.q_pipe, step.i + 1)
        if KIND == _EDGES:
            # The first tile, if the next step has another head. Full tiles have no dead rows.
            t = gl.where(step.t + 1 < step.number, step.t + 1, 0)
            begin = nth_tile(t, tile.tiles, True) * BLOCK_M
            lse2_row = shared.lse2_rows.index(stage_of(shared.q_pipe, step.i + 1))
            _zero_dead(q, lse2_row, begin, begin + BLOCK_M, mask)


@gluon.jit
def _query_tile(
    half: gl.constexpr,
    state,
    step,
    offs,
    shared,
    tile,
    mask,
    scratch,
    qk_scale,
    KIND: gl.constexpr,
    ONE_PASS: gl.constexpr,
):
    """The ``_State`` after one query tile. With ONE_PASS it adds dQ of the previous tile to dq."""
    BLOCK_D: gl.constexpr = shared.q_pipe.tiles.shape[4]
    LEFT: gl.constexpr = operand_layout(BLOCK_D)
    DTYPE: gl.constexpr = shared.q_pipe.tiles.dtype
    offs_m = step.start_m + offs.m
    q, dout = tile_at(shared.q_pipe, step.i), tile_at(shared.do_pipe, step.i)
    dp = _start_dp(half, shared, step, mask, KIND)
    p = _compute_p(state.scores, shared, step, offs_m, offs.n, mask, qk_scale, KIND)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), dout, state.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = _compute_ds(p, dp, shared, step, offs_m, offs.n, mask, KIND).to(DTYPE)
    if ONE_PASS:
        _publish_ds(half, ds, shared, step.i)
    dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, state.dk, is_async=True)
    if ONE_PASS:
        # dQ of the previous tile. The first step multiplies undefined dS and drops the product.
        dq = _start_dq(half, shared, step.i % _BUFFERS, step.again)
    following = tile_at(shared.q_pipe, step.i + 1)
    _wait_for_next(following, shared, step, tile, mask, KIND)
    # The products of dQ stay in flight.
    dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))
    release(shared.q_pipe, step.i)
    scores = _start_scores(half, shared, following, step.again)
    row = state.row
    if ONE_PASS:
        dq = warpgroup_mma_wait(1, deps=(dq,))
        if step.i > 0:
            add_block(scratch.dq_ptr, row, BLOCK_D, half, dq)
        # Computed here, because it would occupy two registers during the step.
        row = scratch.first_row + gl.cast(step.g, gl.int64) * scratch.M_padded + step.start_m
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return _State(dk, dv, scores, row)


@gluon.jit
def _query_tiles(
    half: gl.constexpr,
    state,
    offs,
    shared,
    tile,
    mask,
    scratch,
    qk_scale,
    ONE_PASS: gl.constexpr,
):
    """The ``_State`` after a program's query tiles, kind by kind and head by head."""
    BLOCK_M: gl.constexpr = shared.q_pipe.tiles.shape[3]
    total = tile.steps.end - tile.steps.begin
    past_end = tile.start_n + (half + 1) * WARPGROUP_ROWS > mask.seqlen_k
    before = -tile.steps.begin
    for KIND in gl.static_range(_EDGES, -1, -1 if ONE_PASS else -2):
        count = tile_count(tile.tiles, KIND == _EDGES)
        if ONE_PASS and KIND != _EDGES:
            count = gl.where(past_end == (KIND == _PAST_END), count, 0)
        for g in range(0, tile.G):
            of_head = before + g * count
            for t in range(max(-of_head, 0), min(total - of_head, count)):
                i = of_head + t
                again, stage = i >> 30, stage_of(shared.q_pipe, i)
                start_m = nth_tile(t, tile.tiles, KIND == _EDGES) * BLOCK_M
                step = _Step(i=i, stage=stage, g=g, t=t, number=count, start_m=start_m, again=again)
                state = _query_tile(
                    half, state, step, offs, shared, tile, mask, scratch, qk_scale, KIND,
                    ONE_PASS,
                )  # fmt: skip
        before += tile.G * count
    return state


@gluon.jit
def _last_dq(half: gl.constexpr, shared, row, total, dq_ptr):
    """Adds dQ of a program's last query tile to dq."""
    mbarrier.wait(shared.ds_full.index(total % _BUFFERS), total // _BUFFERS & 1)
    dq = _start_dq(half, shared, total % _BUFFERS, 0)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    add_block(dq_ptr, row, shared.k_tiles.shape[4], half, dq)


@gluon.jit
def _write(state, start_n, offs, seqlen_k, outputs, sm_scale):
    """Writes 64 rows of dk and dv, zeros for padding."""
    BLOCK_D: gl.constexpr = state.dk.shape[1]
    WIDE: gl.constexpr = wide(BLOCK_D)
    DTYPE: gl.constexpr = outputs.dk_ptr.dtype.element_ty
    rows = start_n + offs.wide
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
    inside = (rows < seqlen_k)[:, None]
    dk = gl.convert_layout((state.dk * sm_scale).to(DTYPE), WIDE)
    dk = gl.where(inside, dk, 0.0)
    first, end = outputs.first, outputs.end
    store_rows(outputs.dk_ptr, first, end, rows, columns, dk, outputs.D, True)
    dv = gl.convert_layout(state.dv.to(DTYPE), WIDE)
    dv = gl.where(inside, dv, 0.0)
    store_rows(outputs.dv_ptr, first, end, rows, columns, dv, outputs.Dv, True)


@gluon.jit
def _consume(
    half: gl.constexpr,
    shared,
    tile,
    mask,
    scratch,
    outputs,
    sums,
    scales,
    ONE_PASS: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Computes dk and dv of half the keys of a tile, and half of the tile's contribution to dq.

    If programs share the tile, it also reads or stores partial sums of dk and dv.
    """
    BLOCK_M: gl.constexpr = shared.q_pipe.tiles.shape[3]
    BLOCK_D: gl.constexpr = shared.q_pipe.tiles.shape[4]
    SUMS: gl.constexpr = accumulator_layout(BLOCK_D)
    SHAPE: gl.constexpr = [WARPGROUP_ROWS, BLOCK_D]
    KEYS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_M))
    steps = tile.steps
    start_n = tile.start_n + half * WARPGROUP_ROWS
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator_layout(BLOCK_M))
    offs_n = start_n + gl.arange(0, WARPGROUP_ROWS, KEYS)
    offs_m = gl.arange(0, BLOCK_M, COLUMNS)
    offs_wide = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, wide(BLOCK_D)))
    offs = _Offsets(n=offs_n, m=offs_m, wide=offs_wide)
    total = steps.end - steps.begin
    # One signal serves both.
    dk_sums = sums_of_consumer(sums, half, 2 * WARPGROUP_ROWS)
    dv_sums = PartialSums(
        ptr=sums.ptr, first_row=dk_sums.first_row + WARPGROUP_ROWS, signal_ptr=dk_sums.signal_ptr
    )
    dk, dv = _load_sums(dk_sums, dv_sums, steps, BLOCK_D)
    if total > 0:
        _wait_for_first(half, offs, shared, tile, mask, outputs.end, ONE_PASS, VARLEN)
    # Without a query tile, these scores are undefined and not used.
    scores = _start_scores(half, shared, tile_at(shared.q_pipe, 0), 0)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    state = _State(dk, dv, scores, scratch.first_row)
    state = _query_tiles(half, state, offs, shared, tile, mask, scratch, scales.qk_scale, ONE_PASS)
    if ONE_PASS:
        if total > 0:
            _last_dq(half, shared, state.row, total, scratch.dq_ptr)
    if steps.end < steps.total:
        gl.store(partial_rows(dk_sums, SHAPE, SUMS), state.dk)
        gl.store(partial_rows(dv_sums, SHAPE, SUMS), state.dv)
        signal(dk_sums)
    else:
        _write(state, start_n, offs, mask.seqlen_k, outputs, scales.sm_scale)


@gluon.jit
def _allocate(inputs, STAGES: gl.constexpr, ONE_PASS: gl.constexpr):
    """The ``_Shared`` of a program, with its barriers initialised."""
    BLOCK_M: gl.constexpr = inputs.q.block_type.shape[2]
    k_tiles, v_tiles = make_tiles(inputs.k, 2), make_tiles(inputs.v, 2)
    q_tiles, do_tiles = make_tiles(inputs.q, STAGES), make_tiles(inputs.dout, STAGES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Not used without ONE_PASS.
    ds_tiles = gl.allocate_shared_memory(
        inputs.q.dtype, [2 * _BUFFERS if ONE_PASS else 1, BLOCK_M, WARPGROUP_ROWS], HALVES
    )
    kv_full, ds_full = make_barriers(1), make_barriers(_BUFFERS)
    q_full, do_full, free = make_barriers(STAGES), make_barriers(STAGES), make_barriers(STAGES)
    mbarrier.init(kv_full.index(0), count=1)
    if ONE_PASS:
        # Each consumer writes a half of a buffer. Without ONE_PASS nothing uses these barriers, and
        # Triton 3.6 assigns their memory to the arguments of the warp-specialised partitions too.
        # On an H200, their initialisation then overwrote the arguments in a few of 131,104
        # programs, although the arguments are stored later, after a thread barrier;
        # compute-sanitizer showed it.
        for buffer in gl.static_range(_BUFFERS):
            mbarrier.init(ds_full.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        # Two arrivals: the copy of a tile, and its row of lse2 or delta.
        mbarrier.init(q_full.index(stage), count=2)
        mbarrier.init(do_full.index(stage), count=2)
        # Both consumers release a stage.
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    q_pipe, do_pipe = Pipeline(q_tiles, q_full, free), Pipeline(do_tiles, do_full, free)
    return _Shared(
        k_tiles, v_tiles, kv_full, q_pipe, do_pipe, lse2_rows, delta_rows, ds_tiles, ds_full
    )


@gluon.jit(
    do_not_specialize=[
        "tiles_of_head", "entries", "H", "G", "M", "M_padded", "N", "total_q", "total_k", "D", "Dv",
        "each", "shares", "window_left", "window_right", "sm_scale_bits",
    ],
    do_not_specialize_on_alignment=[
        "lse2_ptr", "delta_ptr", "dk_ptr", "dv_ptr", "dq_ptr", "sums_ptr", "signals_ptr",
        "seqlens_q_ptr", "seqlens_k_ptr",
    ],
)  # fmt: skip
def hopper_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    Dv: gl.int32,
    each: gl.int32,
    shares: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    sm_scale_bits: gl.int64,
    STAGES: gl.constexpr,
    ONE_PASS: gl.constexpr,
    ROW_PADDING: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Writes dk (B,Hk,N,D) and dv (B,Hk,N,Dv), both contiguous, for one key tile of one kv head.

    Two programs may share the steps of a key tile; see ``share_of`` for ``each`` and ``shares``.
    Shared tiles have partial sums (shared tiles,2 BLOCK_N,BLOCK_D), float32, and signals (shared
    tiles,2), int32, which start at 0.

    q, k, v, dout are descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), (B,H,M,Dv), in blocks of
    one query tile or WARPGROUP_ROWS keys, and BLOCK_D columns, with zeros past the tensors' ends.
    lse2 and delta (B,H,M_padded) come from ``bwd_preprocess_kernel``. With ONE_PASS, it adds to dq
    without sm_scale: float32 (B,H,M_padded,BLOCK_D) in the order of ``rows_of_blocks``. Else dq is
    not accessed.

    VARLEN: dk is (Hk,total_k,D) and dv (Hk,total_k,Dv); descriptors are as in
    ``hopper_forward_kernel``, lse2, delta and the rows of dq as in ``dkdv_kernel``. See
    ``sequence_of_tile`` for ``entries``, if it is not 0.
    """
    BLOCK_N: gl.constexpr = 2 * WARPGROUP_ROWS
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    inputs = _Descriptors(q=q_desc, k=k_desc, v=v_desc, dout=dout_desc)
    batch = Batch(
        seqlens_q_ptr=seqlens_q_ptr, seqlens_k_ptr=seqlens_k_ptr, max_seqlen_q=M, max_seqlen_k=N,
        total_q=total_q, total_k=total_k,
    )  # fmt: skip
    # Early key tiles come first: under causal masking they take longest.
    part = partition_of(gl.program_id(0), gl.num_programs(0), tiles_of_head, each, shares)
    n_block = part.block
    Hk = H // G
    b = part.head // Hk
    h_k = part.head % Hk
    if VARLEN:
        if entries > 0:
            b, n_block = sequence_of_tile(n_block, seqlens_k_ptr, entries, total_k, BLOCK_N)
    start_n = n_block * BLOCK_N
    info = seqlen_info(batch, b, VARLEN)
    mask = mask_of(info, window_left, window_right)
    tiles = query_tiles(start_n, mask, BLOCK_N, BLOCK_M)
    steps = steps_of(part, G * (tiles.hi - tiles.lo))
    tile = _KeyTile(h_k=h_k, G=G, start_n=start_n, tiles=tiles, steps=steps)
    sums = PartialSums(
        ptr=sums_ptr, first_row=part.index.to(gl.int64) * (2 * BLOCK_N),
        signal_ptr=signals_ptr + 2 * part.index,
    )  # fmt: skip
    sm_scale = scale_from_bits(sm_scale_bits)
    scales = _Scales(
        qk_scale=base2_scale(sm_scale, gl.float32, 0), sm_scale=sm_scale.to(gl.float32)
    )
    first, end = stored_rows(b, h_k, Hk, info.offset_k, N, info.seqlen_k, total_k, VARLEN)
    outputs = _Outputs(dk_ptr=dk_ptr, dv_ptr=dv_ptr, D=D, Dv=Dv, first=first, end=end)
    # Row 0 of the group's first head.
    first_row = scratch_row(b, h_k * G, H, info.offset_q, M_padded, ROW_PADDING, VARLEN)
    scratch = _Scratch(
        lse2_ptr=lse2_ptr, delta_ptr=delta_ptr, dq_ptr=dq_ptr, first_row=first_row,
        M_padded=M_padded,
    )  # fmt: skip
    shared = _allocate(inputs, STAGES, ONE_PASS)
    gl.warp_specialize(
        [
            (_consume, (0, shared, tile, mask, scratch, outputs, sums, scales, ONE_PASS, VARLEN)),
            (_consume, (1, shared, tile, mask, scratch, outputs, sums, scales, ONE_PASS, VARLEN)),
            (_produce, (inputs, shared, tile, info, scratch, VARLEN)),
        ],
        [4, 1],
        [240, 24],
    )
