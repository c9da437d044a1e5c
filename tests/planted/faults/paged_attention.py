"""The right parts of planted faults: attention to a cache, in PyTorch and in Triton."""

import torch
import triton
import triton.language as tl

from fa_verify import attention_kernel

NARROW = {
    "dtypes": ("fp32",), "cache": ("paged",), "masks": ("causal",), "p_dtype": "fp32",
    "backward": False,
}  # fmt: skip


@triton.jit
def decoding(
    q, k, v, table, lengths, out, lse, places, G, scale, qb, qh, kp, kr, kh, vp, vr, vh,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    PAGE: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Attend with one query of all heads of a group, page by page; columns are adjacent."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, d, e = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BV)
    row = tl.arange(0, triton.next_power_of_2(PAGE))
    first = head * G + g
    mine = (g < G)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + b * qb + first[:, None] * qh + d[None, :], mask=mine, other=0.0)
    length = tl.load(lengths + b)
    top = tl.full((BG,), -float("inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BV), tl.float32)
    for place in range(0, (length + PAGE - 1) // PAGE):
        page = tl.load(table + b * places + place).to(tl.int64)
        there = (row < PAGE) & (place * PAGE + row < length)
        at = page * kp + row[:, None] * kr + head * kh + d[None, :]
        k_tile = tl.load(k + at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        at = page * vp + row[:, None] * vr + head * vh + e[None, :]
        v_tile = tl.load(v + at, mask=there[:, None] & (e < DV)[None, :], other=0.0)
        products = q_tile[:, None, :].to(tl.float32) * k_tile[None, :, :].to(tl.float32)
        scores = tl.where(there[None, :], tl.sum(products, 2) * scale, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        alpha = tl.exp(top - new)
        p = tl.exp(scores - new[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v_tile[None, :, :].to(tl.float32), 1)
        top = new
    divisor = tl.where(total > 0, total, 1.0)
    stored = (g < G) & (g < STORED)
    at = b * tl.num_programs(1) * G + first
    tl.store(lse + at, tl.where(total > 0, top + tl.log(divisor), -float("inf")), mask=stored)
    acc = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DV + e[None, :], acc, mask=stored[:, None] & (e < DV)[None, :])


def decode(stored=1024):
    """Return a Triton kernel that decodes, and stores so many heads of a group."""

    @attention_kernel(**NARROW | {"one_query": True, "masks": (), "zero_sizes": False})
    def attention(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale):
        (B, H, M, D), (_, page, Hk, DV) = q.shape, v_cache.shape
        if any(x.stride(3) != 1 for x in (q, k_cache, v_cache)):
            raise NotImplementedError("columns are adjacent")
        out = torch.empty(B, H, M, DV, dtype=q.dtype, device=q.device)
        lse = torch.empty(B, H, M, dtype=torch.float32, device=q.device)
        decoding[B, Hk](
            q, k_cache, v_cache, page_table.contiguous(), cache_seqlens, out, lse,
            page_table.shape[1], H // Hk, sm_scale, *q.stride()[:2], *k_cache.stride()[:3],
            *v_cache.stride()[:3], D=D, DV=DV, BD=triton.next_power_of_2(D),
            BV=triton.next_power_of_2(DV), BG=triton.next_power_of_2(H // Hk), PAGE=page,
            STORED=stored,
        )  # fmt: skip
        return out, lse

    return attention


def attended(q, k, v, length, scale, left, right):
    """Attend with queries (H, M, D) to the first keys of (S, Hk, D); window bounds may be None."""
    (H, M, _), wide = q.shape, torch.float32
    k, v = (
        x[:length].to(wide).repeat_interleave(H // x.shape[1], 1).transpose(0, 1) for x in (k, v)
    )
    n = torch.arange(length, device=q.device)
    place = torch.arange(M, device=q.device)[:, None] + length - M
    seen = torch.ones(M, length, dtype=torch.bool, device=q.device)
    if left is not None:
        seen = seen & (n >= place - left)
    if right is not None:
        seen = seen & (n <= place + right)
    # Keys that no row sees may lie in pages that are free.
    v = torch.where(seen.any(0)[:, None], v, 0.0)
    scores = torch.where(seen, q.to(wide) @ k.mT * scale, -torch.inf)
    top = scores.amax(-1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1)
    divisor = torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, top + torch.log(divisor), -torch.inf)
    return (p @ v / divisor[..., None]).to(q.dtype), lse


def paged(fault, **words):
    """Return a kernel of pages in PyTorch, with a fault or none."""

    @attention_kernel(**NARROW | words)
    def attention(
        q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, causal=False,
        window_size=(None, None), k=None, v=None,
    ):  # fmt: skip
        page, (left, right) = k_cache.shape[1], window_size
        if causal:
            right = 0
        if fault == "window" and left is not None:
            left = left + 1
        results = []
        for b, length in enumerate(cache_seqlens.tolist()):
            new = 0 if k is None else k.shape[2]
            n = torch.arange(length + new, device=q.device)
            places = n // page
            if fault == "page of the boundary":
                # The first row of a page is looked up with the index of the last key.
                places = (n - (n > 0).long()) // page
            pages = page_table[b].long()[places]
            for cache, given in ((k_cache, k), (v_cache, v)):
                if given is not None:
                    cache[pages[length:], n[length:] % page] = given[b].transpose(0, 1)
            keys = length + new
            if fault == "length" and keys and keys % page == 0:
                keys = keys - 1
            if fault == "past 17":
                keys = min(keys, 17)
            if fault == "append" and new:
                keys = length
            columns = [x[pages, n % page] for x in (k_cache, v_cache)]
            results.append(attended(q[b], *columns, keys, sm_scale, left, right))
        outs, lses = zip(*results, strict=True) if results else ((), ())
        if not results:
            return q.new_empty(*q.shape[:3], v_cache.shape[3]), q.new_empty(q.shape[:3]).float()
        return torch.stack(outs), torch.stack(lses)

    return attention
