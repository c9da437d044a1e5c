"""dq on Hopper: copies by TMA, asynchronous products, two warpgroups of rows and one of loads.

A consumer has 64 rows of a query tile, their queries and dout in shared memory for as long as it
goes through the key tiles. It adds the product of dS and keys of one tile, and computes scores and
dP of the next, in one go; what stands between products, P and dS, it makes while the other consumer
multiplies. What is computed is what ``dq`` computes, in the same order of sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fa_kernels.kernels.common.addressing import scratch_row, store_rows, stored_rows
from fa_kernels.kernels.common.mask import pairs_seen
from fa_kernels.kernels.common.score_mod import base2_scale
from fa_kernels.kernels.common.seqlen_info import sequence, sequence_of_tile
from fa_kernels.kernels.common.softmax import scale_from_bits
from fa_kernels.kernels.common.tile_ranges import share_of, tile_of_head, visible_tiles
from fa_kernels.kernels.hopper.pipeline import (
    PROGRAMS_TOGETHER,
    WARPGROUP_ROWS,
    add_product,
    announce_sums,
    async_load,
    block_of,
    handed_rows,
    matrix,
    start_scores,
    wait_for_sums,
    wide,
    zero_rows,
)

__all__ = ["hopper_dq_kernel"]


@gluon.jit
def _produce(descriptors, resident, staged, barriers, head, G, share, PACKED: gl.constexpr):
    """Loads queries and dout of both consumers, and a share of key tiles in turn, K before V."""
    q_desc, k_desc, v_desc, dout_desc = descriptors
    q_tiles, do_tiles = resident
    k_tiles, v_tiles = staged
    rows_full, k_full, v_full, free = barriers
    places, h, start_m = head
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    of_rows: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes
    if share[0] < share[1]:
        for half in gl.static_range(2):
            place = block_of(places[0], h, start_m + half * WARPGROUP_ROWS, PACKED)
            mbarrier.expect(rows_full.index(half), of_rows)
            async_load(q_desc, place, rows_full.index(half), q_tiles.index(half))
            async_load(dout_desc, place, rows_full.index(half), do_tiles.index(half))
    for tile in range(share[0], share[1]):
        i = tile - share[0]
        stage = i % STAGES
        place = block_of(places[1], h // G, tile * BLOCK_N, PACKED)
        # Of a stage never used the phase before the first counts as over.
        mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, place, k_full.index(stage), k_tiles.index(stage))
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, place, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _zero_padding(k_tiles, k_full, i, tile, view, N, WIDE: gl.constexpr, PACKED: gl.constexpr):
    """Zeros in place of padding in the i-th key tile, before products read it.

    Of dS it is multiplied by 0. The copy has zeros past the tensor's last key.
    """
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    if (PACKED | (view[1] < N)) & ((tile + 1) * BLOCK_N > view[1]):
        mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)
        keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
        zero_rows(matrix(k_tiles, i % STAGES), keys < view[1], WIDE)


@gluon.jit
def _of_weights(p, dp, delta, offs_m, tile, tiles, view, LAYOUT: gl.constexpr):
    """dS of one tile."""
    BLOCK_N: gl.constexpr = p.shape[1]
    ds = p * (dp - delta[:, None])
    if (tile < tiles[1]) | (tile >= tiles[2]):
        offs_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        # Selected, not multiplied by p = 0: p of a hidden key and dp of a hidden v can be infinite.
        ds = gl.where(pairs_seen(offs_m, offs_n, *view), ds, 0.0)
    return ds


@gluon.jit
def _consume(
    half: gl.constexpr,
    resident,
    staged,
    barriers,
    scratch,
    handed,
    written,
    row,
    start_m,
    N,
    tiles,
    share,
    view,
    scales,
    PACKED: gl.constexpr,
):
    """Makes dq of 64 rows out of a share of their key tiles.

    Sums are taken over from who had the tiles before those, and handed on.
    """
    q_tiles, do_tiles = resident
    k_tiles, v_tiles = staged
    rows_full, k_full, v_full, free = barriers
    lse2_ptr, delta_ptr = scratch
    dq_ptr, first_row, end_row, D = written
    qk_scale, sm_scale = scales
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    BLOCK_D: gl.constexpr = k_tiles.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDE: gl.constexpr = wide(BLOCK_D)
    DTYPE: gl.constexpr = dq_ptr.dtype.element_ty
    start_m += half * WARPGROUP_ROWS
    offs_tile = half * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, ROWS)
    offs_m = start_m + gl.arange(0, WARPGROUP_ROWS, ROWS)
    nothing = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    SHAPE: gl.constexpr = [WARPGROUP_ROWS, BLOCK_D]
    handed_ptr, flags_ptr, first_handed = handed
    flag = flags_ptr + half
    first_handed += half * WARPGROUP_ROWS
    first, last = share
    dq = gl.zeros(SHAPE, gl.float32, SUMS)
    if first > tiles[0]:
        wait_for_sums(flag)
        dq = gl.load(handed_rows(handed_ptr, first_handed, SHAPE, SUMS))
    lse2 = gl.load(lse2_ptr + row + offs_tile)
    delta = gl.load(delta_ptr + row + offs_tile)
    if first < last:
        q, dout = matrix(q_tiles, half), matrix(do_tiles, half)
        mbarrier.wait(rows_full.index(half), 0)
        _zero_padding(k_tiles, k_full, 0, first, view, N, WIDE, PACKED)
        scores = start_scores(q, k_tiles, k_full, 0, nothing)
        dp = start_scores(dout, v_tiles, v_full, 0, nothing)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * qk_scale - lse2[:, None])
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = _of_weights(p, dp, delta, offs_m, first, tiles, view, SCORES)
        left = gl.convert_layout(ds.to(DTYPE), LEFT)
        for tile in range(first + 1, last):
            i = tile - first
            dq = add_product(dq, left, k_tiles, k_full, i - 1)
            _zero_padding(k_tiles, k_full, i, tile, view, N, WIDE, PACKED)
            scores = start_scores(q, k_tiles, k_full, i, nothing)
            # Not all at once, for which there are no registers.
            dq = warpgroup_mma_wait(1, deps=(dq,))
            mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
            dp = start_scores(dout, v_tiles, v_full, i, nothing)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            p = gl.exp2(scores * qk_scale - lse2[:, None])
            # It is over since before the product. But ptxas moves no instruction past it: the next
            # wait it puts first, and the exponentials behind the product, not beside it.
            mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = _of_weights(p, dp, delta, offs_m, tile, tiles, view, SCORES)
            left = gl.convert_layout(ds.to(DTYPE), LEFT)
        i = last - 1 - first
        dq = add_product(dq, left, k_tiles, k_full, i)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(free.index(i % STAGES), count=1)

    if last < tiles[3]:
        gl.store(handed_rows(handed_ptr, first_handed, SHAPE, SUMS), dq)
        announce_sums(flag)
    else:
        # Rows without a visible key, padding rows too, may have been made of anything.
        live = gl.convert_layout(lse2, gl.SliceLayout(1, SUMS)) != float("inf")
        of_rows = gl.where(live[:, None], dq * sm_scale, 0.0)
        of_rows = gl.convert_layout(of_rows.to(DTYPE), WIDE)
        rows = start_m + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, WIDE))
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
        store_rows(dq_ptr, first_row, end_row, rows, columns, of_rows, D, BLOCK_D, 1)


@gluon.jit(
    do_not_specialize=[
        "tiles_of_head", "entries", "H", "G", "M", "M_padded", "N", "rows_q", "rows_k", "D", "Dv",
        "each", "shares", "window_left", "window_right", "sm_scale_bits",
    ],
    do_not_specialize_on_alignment=[
        "lse2_ptr", "delta_ptr", "dq_ptr", "handed_ptr", "flags_ptr", "seqlens_q_ptr",
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
    ROW_PADDING: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Writes dq (B,H,M,D), contiguous, for one query tile of one head, or a share of one.

    q, k, v, dout as descriptors of (B,H,M,D), (B,Hk,N,D), (B,Hk,N,Dv), (B,H,M,Dv), in blocks of
    WARPGROUP_ROWS queries or one key tile, and all columns, with zeros past the tensors' ends; lse2
    and delta (B,H,M_padded) of ``delta_kernel``. ``each`` and ``shares`` are those of ``share_of``;
    what is shared has sums in handed (shared tiles,BLOCK_M,BLOCK_D), float32, and flags (shared
    tiles,2) of int32, zeros.

    PACKED: dq (H,rows_q,D), descriptors as of ``hopper_forward_kernel``, lse2 and delta as of
    ``dq_kernel``; ``entries``, if not 0, as of ``sequence_of_tile``.
    """
    BLOCK_M: gl.constexpr = 2 * WARPGROUP_ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    programs = gl.num_programs(0) - each * (shares - 1)
    tile, begin, end = share_of(gl.program_id(0), programs, each, shares)
    heads = programs // tiles_of_head
    place, head = tile_of_head(tile, tiles_of_head, heads, PROGRAMS_TOGETHER)
    # Late query tiles first: under causal masking they are the long ones.
    m_block = tiles_of_head - 1 - place
    b = head // H
    h = head % H
    if PACKED:
        if entries > 0:
            b, m_block = sequence_of_tile(m_block, seqlens_q_ptr, entries, rows_q, BLOCK_M)
    start_m = m_block * BLOCK_M
    place_q, seqlen_q = sequence(seqlens_q_ptr, b, M, rows_q, PACKED)
    place_k, seqlen_k = sequence(seqlens_k_ptr, b, N, rows_k, PACKED)
    view = (seqlen_q, seqlen_k, window_left, window_right)
    tiles = visible_tiles(start_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N)
    steps = tiles[3] - tiles[0]
    share = (tiles[0] + steps * begin // shares, tiles[0] + steps * end // shares)
    handed = (handed_ptr, flags_ptr + 2 * tile, tile.to(gl.int64) * BLOCK_M)
    sm_scale = scale_from_bits(sm_scale_bits)
    scales = (base2_scale(sm_scale, gl.float32, 0), sm_scale.to(gl.float32))
    row = scratch_row(b, h, H, place_q, M_padded, ROW_PADDING, PACKED) + start_m
    first_row, end_row = stored_rows(b, h, H, place_q, M, seqlen_q, rows_q, PACKED)

    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, WARPGROUP_ROWS, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(
        DTYPE, [2, 1, 1, WARPGROUP_ROWS, BLOCK_DV], dout_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(rows_full.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # Both consumers leave its keys, which they need longer than its values.
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    resident, staged = (q_tiles, do_tiles), (k_tiles, v_tiles)
    barriers = (rows_full, k_full, v_full, free)
    scratch, written = (lse2_ptr, delta_ptr), (dq_ptr, first_row, end_row, D)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, resident, staged, barriers, scratch, handed, written, row, start_m, N,
                    tiles, share, view, scales, PACKED,
                ),
            ),
            (
                _consume,
                (
                    1, resident, staged, barriers, scratch, handed, written, row, start_m, N,
                    tiles, share, view, scales, PACKED,
                ),
            ),
            (
                _produce,
                (
                    (q_desc, k_desc, v_desc, dout_desc), resident, staged, barriers,
                    ((place_q, place_k), h, start_m), G, share, PACKED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
