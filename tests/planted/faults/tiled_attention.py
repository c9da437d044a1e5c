"""The right parts of planted faults: tiled attention in Triton, with a backward of two kernels.

A fault is a name, which the kernels compare where they would be right. Tiles have 16 rows and keys.
"""

import torch
import triton
import triton.language as tl

from fa_verify import attention_kernel

TILE = 16
NARROW = {
    "dtypes": ("fp32",), "backward": False, "masks": (), "gqa": False, "max_seqlen": 50,
    "head_dims": (16,), "block_n": TILE, "zero_sizes": False, "p_dtype": "fp32",
}  # fmt: skip


@triton.jit
def visible(m, n, rows, keys, left, right):
    """Return which keys n the rows m see; a negative bound is none."""
    place = m[:, None] + keys - rows
    seen = (m[:, None] < rows) & (n[None, :] < keys)
    if left >= 0:
        seen = seen & (n[None, :] >= place - left)
    if right >= 0:
        seen = seen & (n[None, :] <= place + right)
    return seen


@triton.jit
def tile(x, row, rows, step, D: tl.constexpr, columns, column_step):
    """Load rows of a matrix; those past the end are 0."""
    inside = (row[:, None] < rows) & (columns[None, :] < D)
    at = row.to(tl.int64)[:, None] * step + columns.to(tl.int64)[None, :] * column_step
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def forward(
    q, k, v, out, lse, rows_of, keys_of, qb, qh, qm, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    H, G, M, N, left, right, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a tile of rows of one head."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d, dv = tl.arange(0, BD), tl.arange(0, BV)
    rows, keys = tl.load(rows_of + b), tl.load(keys_of + b)
    if FAULT == "strides of q":
        kn = qm
        kd = qd
    k += b * kb + h // G * kh
    v += b * vb + h // G * vh
    q_tile = tile(q + b * qb + h * qh, m, rows, qm, D, d, qd)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, BV), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        if FAULT == "offsets":
            at = n[:, None] * kn + d[None, :] * kd
            k_tile = tl.load(k + at, mask=(n[:, None] < keys) & (d[None, :] < D), other=0.0)
        else:
            k_tile = tile(k, n, keys, kn, D, d, kd)
        if FAULT == "no other":
            at = n.to(tl.int64)[:, None] * vn + dv.to(tl.int64)[None, :] * vd
            v_tile = tl.load(v + at, mask=(n[:, None] < keys) & (dv[None, :] < DV))
        else:
            v_tile = tile(v, n, keys, vn, DV, dv, vd)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
        if FAULT == "diagonal tile":
            # The tile past the diagonal is skipped; in that of the diagonal all keys are seen.
            seen = visible(m, n, rows, keys, left, -1)
            if right >= 0:
                seen = seen & (n[None, :] // BLOCK <= (m[:, None] + keys - rows + right) // BLOCK)
        else:
            seen = visible(m, n, rows, keys, left, right)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(scores - safe[:, None])
        alpha = tl.exp(top - safe)
        if FAULT == "no rescale":
            total = total + tl.sum(p, 1)
        else:
            total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v_tile.to(tl.float32), input_precision="ieee")
        if FAULT == "accumulator":
            acc = acc.to(v_tile.dtype).to(tl.float32)
        top = new
    full = total > 0
    divisor = tl.where(full, total, 1.0)
    acc = acc / divisor[:, None]
    row = tl.program_id(1).to(tl.int64) * M + m
    tl.store(lse + row, tl.where(full, top + tl.log(divisor), -float("inf")), mask=m < M)
    inside = (m[:, None] < M) & (dv[None, :] < DV)
    tl.store(out + row[:, None] * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    q, k, v, do, lse, delta, dq, dk, dv, rows_of, keys_of, H, M, N, left, right, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
    BY_KEYS: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a tile of keys, or dq of a tile of rows; all tensors are contiguous."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // H
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, keys = tl.load(rows_of + b), tl.load(keys_of + b)
    dq_tile = tl.zeros((BLOCK, BD), tl.float32)
    dk_tile = tl.zeros((BLOCK, BD), tl.float32)
    dv_tile = tl.zeros((BLOCK, BV), tl.float32)
    for start in range(0, M if BY_KEYS else N, BLOCK):
        other = start + tl.arange(0, BLOCK)
        m = other if BY_KEYS else mine
        n = mine if BY_KEYS else other
        q_tile = tile(q + bh * M * D, m, rows, D, D, d, 1)
        lse_tile = tl.load(lse + bh * M + m, mask=m < M, other=0.0)
        do_tile = tile(do + bh * M * DV, m, rows, DV, DV, e, 1)
        # A row without a key has no gradient, whatever dout holds.
        do_tile = tl.where((lse_tile == -float("inf"))[:, None], 0.0, do_tile)
        k_tile = tile(k + bh * N * D, n, keys, D, D, d, 1)
        v_tile = tile(v + bh * N * DV, n, keys, DV, DV, e, 1)
        if FAULT == "delta":
            delta_tile = tl.load(delta + bh * M + m, mask=m < M)
        else:
            delta_tile = tl.load(delta + bh * M + m, mask=m < M, other=0.0)
        safe = tl.where(lse_tile == -float("inf"), 0.0, lse_tile)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
        if FAULT == "mask":
            seen = visible(m, n, rows, keys, -1, -1)
        else:
            seen = visible(m, n, rows, keys, left, right)
        if FAULT == "delta":
            seen = n[None, :] < keys
        p = tl.exp(tl.where(seen, scores - safe[:, None], -float("inf")))
        ds = p * (tl.dot(do_tile, v_tile.T, input_precision="ieee") - delta_tile[:, None])
        ds = tl.where(seen, ds, 0.0)
        if BY_KEYS:
            dv_tile += tl.dot(p.T.to(do_tile.dtype), do_tile, input_precision="ieee")
            dk_tile += tl.dot(ds.T.to(q_tile.dtype), q_tile, input_precision="ieee")
        else:
            dq_tile += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    if BY_KEYS:
        at = bh * N * D + mine[:, None] * D + d[None, :]
        inside = (mine[:, None] < N) & (d[None, :] < D)
        tl.store(dk + at, (dk_tile * scale).to(dk.dtype.element_ty), mask=inside)
        at = bh * N * DV + mine[:, None] * DV + e[None, :]
        inside = (mine[:, None] < N) & (e[None, :] < DV)
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)
    else:
        at = bh * M * D + mine[:, None] * D + d[None, :]
        inside = (mine[:, None] < M) & (d[None, :] < D)
        tl.store(dq + at, (dq_tile * scale).to(dq.dtype.element_ty), mask=inside)


class Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, scale, fault):
        (B, H, M, D), (_, Hk, N, DV) = q.shape, v.shape
        out = torch.empty(B, H, M, DV, dtype=q.dtype, device=q.device)
        lse = torch.empty(B, H, M, dtype=torch.float32, device=q.device)
        lengths = [
            torch.tensor(x, dtype=torch.int32, device=q.device) for x in mask.lengths(B, M, N)
        ]
        right = 0 if mask.causal else mask.window_right
        ends = [-1 if x is None else x for x in (mask.window_left, right)]
        sizes = {"D": D, "DV": DV, "BD": block(D), "BV": block(DV), "BLOCK": TILE, "FAULT": fault}
        forward[-(-M // TILE), B * H](
            q, k, v, out, lse, *lengths, *q.stride(), *k.stride(), *v.stride(), H, H // Hk, M, N,
            *ends, scale, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.rest = ends, scale, sizes
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        ends, scale, sizes = ctx.rest
        (B, H, M, _), (_, Hk, N, _) = q.shape, k.shape
        q, do = q.contiguous(), do.contiguous()
        heads = [x.repeat_interleave(H // Hk, 1).contiguous() for x in (k, v)]
        seen = (lse != -torch.inf)[..., None]
        delta = torch.where(seen, do.float() * out.float(), 0.0).sum(-1).contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, *heads))
        for by_keys, size in ((True, N), (False, M)):
            backward[-(-size // TILE), B * H](
                q, *heads, do, lse, delta, dq, dk, dv, *lengths, H, M, N, *ends, scale,
                **sizes, BY_KEYS=by_keys,
            )  # fmt: skip
        dk, dv = (x.unflatten(1, (Hk, -1)).float().sum(2).to(x.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None, None


def block(columns):
    return max(TILE, triton.next_power_of_2(columns))


def tiled(fault, **words):
    """Return a tiled kernel with a fault, or with none."""

    @attention_kernel(**NARROW | words)
    def attention(q, k, v, *, mask, sm_scale):
        return Tiled.apply(q, k, v, mask, sm_scale, fault)

    return attention
