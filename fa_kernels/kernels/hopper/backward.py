"""dk and dv on Hopper, and dq in the same pass if it is asked for.

As in ``dkdv`` one program has a key tile and all query tiles of a group of heads, transposed. Each
of two consumers has half the keys. While it takes the softmax of one query tile the tensor cores
multiply dP; then come dV, dK, dQ of the tile before and the scores of the next, behind each other,
so that the other work of a tile is done beside products. dS goes through shared memory, since dQ
sums over the keys of both consumers: each makes half of it, a tile later, so that it seldom waits
for the other's dS, and adds that to sums in memory, in the order in which its threads have it. A
producer loads what the consumers read.

Source: FlashAttention-3 (arXiv:2407.08608), section 3.1 and its appendix on the backward pass.
"""

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
from fa_kernels.kernels.common.seqlen_info import sequence, sequence_of_tile
from fa_kernels.kernels.common.softmax import scale_from_bits
from fa_kernels.kernels.common.tile_ranges import share_of, tile_of_head, visible_tiles
from fa_kernels.kernels.hopper.pipeline import (
    PROGRAMS_TOGETHER,
    WARPGROUP_ROWS,
    add_block,
    announce_sums,
    async_load,
    block_of,
    handed_rows,
    matrix,
    thread_barrier,
    wait_for_sums,
    wide,
    zero_rows,
)

__all__ = ["hopper_backward_kernel"]

# Kinds of query tiles, in the order they are taken in: of pairs that are not all visible; of those
# that are but for keys past the end, which spoil dq, and no more than their own rows of dk and dv;
# and, by 0, all others.
_EDGES: gl.constexpr = gl.constexpr(2)
_PAST_END: gl.constexpr = gl.constexpr(1)
# Of dS: one that is read, one that both have written, and one that a consumer ahead writes.
_BUFFERS: gl.constexpr = gl.constexpr(3)


@gluon.jit
def _copy_row(pointer, row, barrier):
    """A row of float32 into shared memory, by one warp; the barrier hears of it."""
    SIZE: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE // 32], [32], [1], [0])
    row.store(gl.load(pointer + gl.arange(0, SIZE, LAYOUT)))
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _produce(
    keys,
    values,
    queries,
    douts,
    scratch,
    rows_of,
    barriers,
    head,
    G,
    M_padded,
    start_n,
    tiles,
    share,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Loads a key tile, and its share of query tiles of G heads with rows of lse2 and delta."""
    k_desc, k_tiles = keys
    v_desc, v_tiles = values
    q_desc, q_tiles = queries
    do_desc, do_tiles = douts
    lse2_ptr, delta_ptr = scratch
    lse2_rows, delta_rows = rows_of
    kv_full, q_full, do_full, free = barriers
    places, h_k, first_row = head
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    total = share[1] - share[0]
    if total > 0:
        of_half: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
        mbarrier.expect(kv_full.index(0), 2 * of_half)
        for half in gl.static_range(2):
            place = block_of(places[1], h_k, start_n + half * WARPGROUP_ROWS, PACKED)
            async_load(k_desc, place, kv_full.index(0), k_tiles.index(half))
            async_load(v_desc, place, kv_full.index(0), v_tiles.index(half))
    before = -share[0]
    for MASKED in gl.static_range(1, -1, -1):
        count = tile_count(tiles, MASKED)
        for g in range(0, G):
            of_head = before + g * count
            for t in range(max(-of_head, 0), min(total - of_head, count)):
                i = of_head + t
                stage = i % STAGES
                start_m = nth_tile(t, tiles, MASKED) * BLOCK_M
                place = block_of(places[0], h_k * G + g, start_m, PACKED)
                row = first_row + gl.cast(g, gl.int64) * M_padded + start_m
                # Of a stage never used the phase before the first counts as over.
                mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
                mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
                async_load(q_desc, place, q_full.index(stage), q_tiles.index(stage))
                _copy_row(lse2_ptr + row, lse2_rows.index(stage), q_full.index(stage))
                mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
                async_load(do_desc, place, do_full.index(stage), do_tiles.index(stage))
                _copy_row(delta_ptr + row, delta_rows.index(stage), do_full.index(stage))
        before += G * count


@gluon.jit
def _zero_dead(tile, lse2_row, begin, end, view, WIDE: gl.constexpr):
    """Zeros in place of rows without a visible key, padding rows too, which may hold anything.

    The tile is one of those of rows [begin, end); where they all see a key it is left alone.
    """
    if (begin < view[0] - view[1] - view[3]) | (end > view[0]):
        zero_rows(tile, lse2_row.load(gl.SliceLayout(1, WIDE)) != float("inf"), WIDE)


@gluon.jit
def _seen_alone(x, offs_m, offs_n, view):
    """Selected, not multiplied by 0: p of a hidden key and dp of a hidden v can be infinite."""
    return gl.where(pairs_seen(offs_n, offs_m, view[1], view[0], view[3], view[2]), x, 0.0)


@gluon.jit
def _start_dq(half: gl.constexpr, ds_tiles, k_tiles, buffer, again):
    """Begins the product of the dS in a buffer and all keys: one of dQ's two blocks of 64 x 64.

    They are beside or below each other. ``again`` is 0.
    """
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, BLOCK)
    for each in gl.static_range(2):
        left = ds_tiles.index(buffer * 2 + each)
        right = matrix(k_tiles, each + again)
        if k_tiles.shape[4] == 128:
            right = right.slice(half * 64, 64, 1)
        else:
            left = left.slice(half * 64, 64, 0)
        dq = warpgroup_mma(left, right, dq, use_acc=each > 0, is_async=True)
    return dq


@gluon.jit
def _consume(
    half: gl.constexpr,
    resident,
    staged,
    rows_of,
    ds_tiles,
    barriers,
    ds_full,
    dq_ptr,
    handed,
    written,
    first_row,
    G,
    M_padded,
    start_n,
    tiles,
    share,
    view,
    scales,
    STAGES: gl.constexpr,
    ONE_PASS: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Makes dk and dv of half the keys of a tile, and half of what the tile adds to dq.

    Of its share of query tiles: sums are taken over from who had those before, and handed on.
    """
    k_tiles, v_tiles = resident
    q_tiles, do_tiles = staged
    lse2_rows, delta_rows = rows_of
    kv_full, q_full, do_full, free = barriers
    dk_ptr, dv_ptr, D, Dv, first_key, end_key = written
    qk_scale, sm_scale = scales
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    WIDE: gl.constexpr = wide(BLOCK_D)
    DTYPE: gl.constexpr = dk_ptr.dtype.element_ty
    start_n += half * WARPGROUP_ROWS
    offs_n = start_n + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, SCORES))
    offs_tile = gl.arange(0, BLOCK_M, COLUMNS)
    offs_wide = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, WIDE))
    past_end = start_n + WARPGROUP_ROWS > view[1]
    handed_ptr, flags_ptr, first_handed, last = handed
    total = share[1] - share[0]
    flag = flags_ptr + half
    SHAPE: gl.constexpr = [WARPGROUP_ROWS, BLOCK_D]
    first_handed += half * 2 * WARPGROUP_ROWS
    of_values = first_handed + WARPGROUP_ROWS
    dk = gl.zeros(SHAPE, gl.float32, SUMS)
    dv = gl.zeros(SHAPE, gl.float32, SUMS)
    if share[0] > 0:
        wait_for_sums(flag)
        dk = gl.load(handed_rows(handed_ptr, first_handed, SHAPE, SUMS))
        dv = gl.load(handed_rows(handed_ptr, of_values, SHAPE, SUMS))
    nothing = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    if total > 0:
        mbarrier.wait(kv_full.index(0), 0)
        # The copy has zeros past the tensor's last key. Of the others before it p and dS are
        # selected; their keys are multiplied all the same, in dQ.
        if ONE_PASS:
            if (PACKED | (view[1] < end_key)) & (view[1] - start_n < WARPGROUP_ROWS):
                zero_rows(matrix(k_tiles, half), start_n + offs_wide < view[1], WIDE)
            # As of the dS before the first: nobody multiplies the other's keys earlier.
            mbarrier.arrive(ds_full.index(0), count=1)
        mbarrier.wait(q_full.index(0), 0)
        begin, end = tiles[0] * BLOCK_M, tiles[3] * BLOCK_M
        _zero_dead(matrix(q_tiles, 0), lse2_rows.index(0), begin, end, view, WIDE)
    # Of no query tile they are made of whatever is there, and mean nothing.
    q = matrix(q_tiles, 0)
    scores = warpgroup_mma(
        matrix(k_tiles, half), q.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    before = -share[0]
    # Of the query tile before, to which dQ is added a step later; of none it is not.
    row = first_row
    for KIND in gl.static_range(_EDGES, -1, -1 if ONE_PASS else -2):
        count = tile_count(tiles, KIND == _EDGES)
        if ONE_PASS and KIND != _EDGES:
            count = gl.where(past_end == (KIND == _PAST_END), count, 0)
        for g in range(0, G):
            of_head = before + g * count
            for t in range(max(-of_head, 0), min(total - of_head, count)):
                i = of_head + t
                # 0, which the compiler does not know: it would keep the places of all tiles that
                # stay over the loop, in registers that there are not.
                again = i >> 30
                stage = i % STAGES
                start_m = nth_tile(t, tiles, KIND == _EDGES) * BLOCK_M
                offs_m = start_m + offs_tile
                q, dout = matrix(q_tiles, stage), matrix(do_tiles, stage)
                mbarrier.wait(do_full.index(stage), i // STAGES & 1)
                if KIND == _EDGES:
                    _zero_dead(dout, lse2_rows.index(stage), start_m, start_m + BLOCK_M, view, WIDE)
                v = matrix(v_tiles, half + again)
                dp = warpgroup_mma(v, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
                lse2 = lse2_rows.index(stage).load(COLUMNS)
                p = gl.exp2(scores * qk_scale - lse2[None, :])
                if KIND == _EDGES:
                    p = _seen_alone(p, offs_m, offs_n, view)
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), dout, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                delta = delta_rows.index(stage).load(COLUMNS)
                ds = p * (dp - delta[None, :])
                if KIND == _EDGES:
                    ds = _seen_alone(ds, offs_m, offs_n, view)
                if KIND == _PAST_END:
                    ds = gl.where((offs_n < view[1])[:, None], ds, 0.0)
                ds = ds.to(DTYPE)
                if ONE_PASS:
                    last_made, made = i % _BUFFERS, (i + 1) % _BUFFERS
                    # Who has made dS of the tile before has done with that of three tiles before,
                    # which is in this buffer.
                    mbarrier.wait(ds_full.index(last_made), i // _BUFFERS & 1)
                    ds_tiles.index(made * 2 + half).permute((1, 0)).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(made), count=1)
                dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
                if ONE_PASS:
                    # Of the tile before. In the first step of whatever is there, for nobody.
                    dq = _start_dq(half, ds_tiles, k_tiles, last_made, again)
                following = (i + 1) % STAGES
                q = matrix(q_tiles, following)
                if i + 1 < total:
                    mbarrier.wait(q_full.index(following), (i + 1) // STAGES & 1)
                    if KIND == _EDGES:
                        # The first one, if that is another head's; full ones are left alone.
                        begin = nth_tile(gl.where(t + 1 < count, t + 1, 0), tiles, True) * BLOCK_M
                        lse2_row = lse2_rows.index(following)
                        _zero_dead(q, lse2_row, begin, begin + BLOCK_M, view, WIDE)
                # What dQ is made of stays in flight.
                dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))
                mbarrier.arrive(free.index(stage), count=1)
                k = matrix(k_tiles, half + again)
                scores = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                if ONE_PASS:
                    dq = warpgroup_mma_wait(1, deps=(dq,))
                    if i > 0:
                        add_block(dq_ptr, row, BLOCK_D, half, dq)
                    row = first_row + gl.cast(g, gl.int64) * M_padded + start_m
                scores = warpgroup_mma_wait(0, deps=(scores,))
        before += G * count
    if ONE_PASS:
        if total > 0:
            mbarrier.wait(ds_full.index(total % _BUFFERS), total // _BUFFERS & 1)
            dq = _start_dq(half, ds_tiles, k_tiles, total % _BUFFERS, 0)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            add_block(dq_ptr, row, BLOCK_D, half, dq)

    if share[1] < last:
        gl.store(handed_rows(handed_ptr, first_handed, SHAPE, SUMS), dk)
        gl.store(handed_rows(handed_ptr, of_values, SHAPE, SUMS), dv)
        announce_sums(flag)
    else:
        rows = start_n + offs_wide
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
        inside = (rows < view[1])[:, None]
        made = gl.convert_layout((dk * sm_scale).to(DTYPE), WIDE)
        made = gl.where(inside, made, 0.0)
        store_rows(dk_ptr, first_key, end_key, rows, columns, made, D, BLOCK_D, 1)
        made = gl.convert_layout(dv.to(DTYPE), WIDE)
        made = gl.where(inside, made, 0.0)
        store_rows(dv_ptr, first_key, end_key, rows, columns, made, Dv, BLOCK_D, 1)


@gluon.jit(
    do_not_specialize=[
        "tiles_of_head", "entries", "H", "G", "M", "M_padded", "N", "rows_q", "rows_k", "D", "Dv",
        "each", "shares", "window_left", "window_right", "sm_scale_bits",
    ],
    do_not_specialize_on_alignment=[
        "lse2_ptr", "delta_ptr", "dk_ptr", "dv_ptr", "dq_ptr", "handed_ptr", "flags_ptr",
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
    handed_ptr,
    flags_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    tiles_of_head: gl.int32,
    entries: gl.int32,
    H: gl.int32,
    G: gl.int32,
    M: gl.int32,
    M_padded: gl.int32,
    N: gl.int32,
    rows_q: gl.int32,
    rows_k: gl.int32,
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
    PACKED: gl.constexpr,
):
    """Writes dk (B,Hk,N,D) and dv (B,Hk,N,Dv), both contiguous, for one key tile of one kv head.

    Or for a share of its query tiles: ``each`` and ``shares`` are those of ``share_of``. What is
    shared has sums in handed (shared tiles,2 BLOCK_N,BLOCK_D), float32, and flags (shared tiles,2)
    of int32, zeros.

    q, k, v, dout as descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), (B,H,M,Dv), in blocks of
    one query tile or WARPGROUP_ROWS keys, and BLOCK_D columns, with zeros past the tensors' ends;
    lse2 and delta (B,H,M_padded) of ``delta_kernel``. With ONE_PASS it adds to dq, float32
    (B,H,M_padded,BLOCK_D) as of ``rows_of_blocks``, without sm_scale; else that is not touched.

    PACKED: dk (Hk,rows_k,D) and dv (Hk,rows_k,Dv), descriptors as of ``hopper_forward_kernel``,
    lse2, delta and the rows of dq as of ``dkdv_kernel``; ``entries``, if not 0, as of
    ``sequence_of_tile``.
    """
    BLOCK_N: gl.constexpr = 2 * WARPGROUP_ROWS
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    DTYPE: gl.constexpr = q_desc.dtype
    programs = gl.num_programs(0) - each * (shares - 1)
    tile, begin, end = share_of(gl.program_id(0), programs, each, shares)
    # Early key tiles are the long ones under causal masking.
    heads = programs // tiles_of_head
    n_block, head = tile_of_head(tile, tiles_of_head, heads, PROGRAMS_TOGETHER)
    Hk = H // G
    b = head // Hk
    h_k = head % Hk
    if PACKED:
        if entries > 0:
            b, n_block = sequence_of_tile(n_block, seqlens_k_ptr, entries, rows_k, BLOCK_N)
    start_n = n_block * BLOCK_N
    place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
    place_k, seqlen_k = sequence(seqlens_k_ptr, b, N, rows_k, PACKED)
    view = (seqlen_q, seqlen_k, window_left, window_right)
    tiles = visible_tiles(start_n, seqlen_k, seqlen_q, window_right, window_left, BLOCK_N, BLOCK_M)
    steps = G * (tiles[3] - tiles[0])
    share = (steps * begin // shares, steps * end // shares)
    handed = (handed_ptr, flags_ptr + 2 * tile, tile.to(gl.int64) * (2 * BLOCK_N), steps)
    sm_scale = scale_from_bits(sm_scale_bits)
    scales = (base2_scale(sm_scale, gl.float32, 0), sm_scale.to(gl.float32))
    first_key, end_key = stored_rows(b, h_k, Hk, place_k, N, seqlen_k, rows_k, PACKED)
    # Of the group's first head.
    first_row = scratch_row(b, h_k * G, H, place_q, M_padded, ROW_PADDING, PACKED)

    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, WARPGROUP_ROWS, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, WARPGROUP_ROWS, BLOCK_D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], dout_desc.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Without ONE_PASS nothing touches them.
    ds_tiles = gl.allocate_shared_memory(
        DTYPE, [2 * _BUFFERS if ONE_PASS else 1, BLOCK_M, WARPGROUP_ROWS], HALVES
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    if ONE_PASS:
        # Else nobody uses them, and their memory is another's: of what consumers are told, which
        # this was seen to overwrite, though it stands before that and barriers of threads between.
        for buffer in gl.static_range(_BUFFERS):
            # Both consumers write a half of it.
            mbarrier.init(ds_full.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        # A tile, and its row of lse2 or delta.
        mbarrier.init(q_full.index(stage), count=2)
        mbarrier.init(do_full.index(stage), count=2)
        # Both consumers leave it.
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    barriers = (kv_full, q_full, do_full, free)
    rows_of = (lse2_rows, delta_rows)
    resident, staged = (k_tiles, v_tiles), (q_tiles, do_tiles)
    written = (dk_ptr, dv_ptr, D, Dv, first_key, end_key)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, resident, staged, rows_of, ds_tiles, barriers, ds_full, dq_ptr, handed,
                    written, first_row, G, M_padded, start_n, tiles, share, view, scales,
                    STAGES, ONE_PASS, PACKED,
                ),
            ),
            (
                _consume,
                (
                    1, resident, staged, rows_of, ds_tiles, barriers, ds_full, dq_ptr, handed,
                    written, first_row, G, M_padded, start_n, tiles, share, view, scales,
                    STAGES, ONE_PASS, PACKED,
                ),
            ),
            (
                _produce,
                (
                    (k_desc, k_tiles), (v_desc, v_tiles), (q_desc, q_tiles), (dout_desc, do_tiles),
                    (lse2_ptr, delta_ptr), rows_of, barriers, ((place_q, place_k), h_k, first_row),
                    G, M_padded, start_n, tiles, share, STAGES, PACKED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
