"""Pooled probabilities: the mean or maximum of P over blocks of pairs, from q, k and lse.

One program per span of pool blocks of one head. A span is one block if the block is at least as
large as a tile, else the whole blocks that fit a tile. P is recomputed tile by tile, so the M x N
matrix is never materialised. Each block is written by one program.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, line 11, for P.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.addressing import Tensor, head_matrix, load_tile
from fa_kernels.kernels.common.block_info import KernelConfig
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.kernels.common.seqlen_info import valid_lengths
from fa_kernels.kernels.common.softmax import LOG2E, scale_from_bits
from fa_kernels.kernels.common.tile_ranges import visible_tiles

__all__ = ["pool_kernel", "sees_block"]


@triton.jit
def sees_block(b, h, m, n, args):
    """The predicate of a ``block_mask``; args are (mask, its three strides, block size)."""
    row, column = m // args[4], n // args[4]
    return tl.load(args[0] + (h * args[1] + row * args[2] + column * args[3])) != 0


@triton.jit
def _joined(a, b, MAX: tl.constexpr):
    """Combines two parts of a block by maximum or sum."""
    return tl.maximum(a, b) if MAX else a + b


@triton.jit
def _over_rows(tile, MAX: tl.constexpr):
    """Reduces each column by maximum or sum."""
    return tl.max(tile, 0) if MAX else tl.sum(tile, 0)


@triton.jit
def _probabilities(q, lse2, keys, start_n, valid, seen, qk_scale, CONFIG: tl.constexpr):
    """Returns P of one tile, 0 where not ``seen``; keys that are not ``valid`` are not read."""
    offs_d = tl.arange(0, CONFIG.BLOCK_D)
    offs_tile = tl.arange(0, CONFIG.BLOCK_N)
    # (BLOCK_D, BLOCK_N)
    k_t = load_tile(
        keys, start_n, offs_tile[None, :], offs_d[:, None], valid[None, :], CONFIG.ALIGNED, True
    )
    # (BLOCK_M, BLOCK_N)
    scores = tl.dot(q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)
    p = tl.exp2(scores * qk_scale - lse2[:, None])
    # p of a hidden key can be infinite.
    return tl.where(seen, p, 0.0)


@triton.jit
def _row_tile(
    q,
    lse2,
    keys,
    mask,
    offs_m,
    first,
    last,
    end_n,
    qk_scale,
    CONFIG: tl.constexpr,
    MAX: tl.constexpr,
):
    """Combines P of a query tile over the key tiles in [first, last), up to key end_n."""
    pooled = tl.zeros([CONFIG.BLOCK_M, CONFIG.BLOCK_N], CONFIG.ACC)
    for start_n in range(first, last, CONFIG.BLOCK_N):
        offs_n = start_n + tl.arange(0, CONFIG.BLOCK_N)
        valid = offs_n < end_n
        seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)
        seen = seen & valid[None, :]
        some = 1
        if CONFIG.PREDICATE is not None:
            # A predicate can hide a whole tile of the range.
            some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        if some > 0:
            p = _probabilities(q, lse2, keys, start_n, valid, seen, qk_scale, CONFIG)
            pooled = _joined(pooled, p, MAX)
    return pooled


@kernel
def pool_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    pooled_ptr,
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
    H: tl.int32,
    G: tl.int32,
    M: tl.int32,
    N: tl.int32,
    D: tl.int32,
    pool_rows: tl.int32,
    pool_keys: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    sm_scale_bits: tl.int64,
    mask_args,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    DOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICATE: tl.constexpr,
    MAX: tl.constexpr,
):
    """Writes pooled (B,H,ceil(M/pool_rows),ceil(N/pool_keys)), contiguous, for one span of blocks.

    lse (B,H,M) is contiguous; pool_rows <= M and pool_keys <= N. The sum of a block runs over key
    tiles, then row tiles, then the rows of a tile, then its keys. An addend takes part in at most
    as many additions as the block has rows and keys together.
    """
    CONFIG: tl.constexpr = KernelConfig(
        BLOCK_M, BLOCK_N, BLOCK_D, None, ACC, DOTS, ALIGNED, PREDICATE, 0
    )
    # A span is one block of several tiles, or the whole blocks that fit one tile.
    rows_each = tl.maximum(BLOCK_M // pool_rows, 1)
    keys_each = tl.maximum(BLOCK_N // pool_keys, 1)
    row_blocks = tl.cdiv(M, pool_rows)
    key_blocks = tl.cdiv(N, pool_keys)
    key_spans = tl.cdiv(key_blocks, keys_each)
    row_spans = tl.cdiv(row_blocks, rows_each)
    key_span = tl.program_id(0) % key_spans
    row_span = tl.program_id(0) // key_spans % row_spans
    bh = tl.program_id(0) // key_spans // row_spans
    b = bh // H
    h = bh % H
    seqlen_q, seqlen_k = valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N)
    mask = AttentionMask(seqlen_q, seqlen_k, window_left, window_right, b, h, mask_args)
    q_tensor = Tensor(q_ptr, stride_qb, stride_qh, stride_qm, stride_qd, D)
    k_tensor = Tensor(k_ptr, stride_kb, stride_kh, stride_kn, stride_kd, D)
    queries = head_matrix(q_tensor, b, h)
    keys = head_matrix(k_tensor, b, h // G)

    start_m = row_span * rows_each * pool_rows
    start_n = key_span * keys_each * pool_keys
    end_m = tl.minimum(start_m + rows_each * pool_rows, seqlen_q)
    end_n = tl.minimum(start_n + keys_each * pool_keys, seqlen_k)
    offs_tile_m = tl.arange(0, BLOCK_M)
    offs_tile_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    qk_scale = (scale_from_bits(sm_scale_bits) * LOG2E).to(ACC)
    # Elementwise over all tiles of the span.
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for first_m in range(start_m, end_m, BLOCK_M):
        offs_m = first_m + offs_tile_m
        row = bh.to(tl.int64) * M + offs_m
        lse = tl.load(lse_ptr + row, mask=offs_m < end_m, other=-float("inf"))
        # Rows without a visible key and rows of other spans are not read; their P is 0.
        live = lse != -float("inf")
        lse2 = tl.where(live, lse * LOG2E, float("inf"))
        q = load_tile(
            queries, first_m, offs_tile_m[:, None], offs_d[None, :], live[:, None], ALIGNED, True
        )
        # With tiles of one key, the range holds the keys that some row sees.
        within = visible_tiles(first_m, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, 1)
        # equivalent: 1 key is no whole tile, so 1 in place of 0 skips none.
        skipped = tl.maximum(within.lo - start_n, 0) // BLOCK_N * BLOCK_N
        part = _row_tile(
            q, lse2, keys, mask, offs_m, start_n + skipped, tl.minimum(within.hi, end_n), end_n,
            qk_scale, CONFIG, MAX,
        )  # fmt: skip
        total = _joined(total, part, MAX)

    # 64-bit, because the number of pairs of a block can exceed 32 bits.
    key_block = (key_span * keys_each + offs_tile_n).to(tl.int64)
    keys_of = tl.minimum((key_block + 1) * pool_keys, seqlen_k) - key_block * pool_keys
    inside = (offs_tile_n < keys_each) & (key_block < key_blocks)
    # (BLOCK_N, BLOCK_N): whether a key of the tile belongs to a block.
    of_block = (offs_tile_n // pool_keys)[:, None] == offs_tile_n[None, :]
    for i in range(0, tl.minimum(rows_each, row_blocks - row_span * rows_each)):
        of_rows = (offs_tile_m // pool_rows == i)[:, None]
        columns = _over_rows(tl.where(of_rows, total, 0.0), MAX)
        pooled = _over_rows(tl.where(of_block, columns[:, None], 0.0), MAX)
        row_block = row_span * rows_each + i
        if not MAX:
            rows_of = tl.minimum((row_block + 1) * pool_rows, seqlen_q) - row_block * pool_rows
            # A block of padding alone has no valid pair: its 0 is divided by 1.
            pooled = pooled / tl.maximum(rows_of * keys_of, 1)
        block = (bh.to(tl.int64) * row_blocks + row_block) * key_blocks + key_block
        tl.store(pooled_ptr + block, pooled, mask=inside)
