"""FlashAttention-2 in plain PyTorch, untiled: it rounds where a kernel does, or has a fault."""

from __future__ import annotations

import math

import torch

__all__ = ["FAULTS", "FlashAttention2"]

LOG2E = math.log2(math.e)
FAULTS = (
    "dq times 1.01",
    "delta of rounded products",
    "dS cast twice",
    "one tile of dq times 1.003",
    "dS cast to fp16",
    "P cast to fp16",
)


class FlashAttention2:
    """Attention whose backward reads out and lse; float32 between 16-bit inputs and outputs."""

    returns_lse = True
    devices = ("cpu",)
    backward_reads = ("out", "lse")

    def __init__(self, fault: str = "", keeps_sums: bool = False) -> None:
        """With ``keeps_sums``, the backward reads a row's maximum and sum in place of lse."""
        assert fault in ("", *FAULTS)
        self.fault = fault
        self.keeps_sums = keeps_sums

    def __call__(self, q, k, v, *, mask, sm_scale):
        return _Attention.apply(self.fault, self.keeps_sums, mask, sm_scale, q, k, v)


def _scores(q, k, mask, sm_scale):
    """Returns scores in base 2, (B, H, M, N), -inf where hidden."""
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    seen = mask.dense(B, H, M, N)
    scores = q.float() @ k.float().repeat_interleave(H // Hk, 1).mT
    return (scores * (sm_scale * LOG2E)).masked_fill(~seen, -math.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fault, keeps_sums, mask, sm_scale, q, k, v):
        scores = _scores(q, k, mask, sm_scale)
        m = scores.amax(3, keepdim=True)
        m = m.masked_fill(m == -math.inf, 0.0)
        p = torch.exp2(scores - m)
        total = p.sum(3, keepdim=True)
        values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = p.to(q.dtype).float() @ values / total.masked_fill(total == 0, 1.0)
        lse = ((m + total.log2()) / LOG2E).squeeze(3)
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse)
        ctx.sums = (m, total) if keeps_sums else None
        ctx.given = fault, mask, sm_scale
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        fault, mask, sm_scale = ctx.given
        (B, H, _, _), (Hk, N) = q.shape, k.shape[1:3]
        keys, values = (x.float().repeat_interleave(H // Hk, 1) for x in (k, v))
        dout = dout.float().masked_fill((lse == -math.inf).unsqueeze(3), 0.0)
        base = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
        scores = _scores(q, k, mask, sm_scale)
        p = torch.exp2(scores - base.unsqueeze(3))
        if ctx.sums is not None:
            m, total = ctx.sums
            p = torch.exp2(scores - m) / total.masked_fill(total == 0, 1.0)
        products = out.float() * dout
        if fault == "delta of rounded products":
            products = products.to(q.dtype).float()
        ds = p * (dout @ values.mT - products.sum(3, keepdim=True))
        if fault == "dS cast twice":
            ds = _cast(ds * sm_scale, q.dtype) / sm_scale
        if fault == "dS cast to fp16":
            ds = _cast(ds, torch.float16)
        if fault == "P cast to fp16":
            p = _cast(p, torch.float16)
        p, ds = (_cast(x, q.dtype) for x in (p, ds))
        dq = ds @ keys * sm_scale
        if fault == "dq times 1.01":
            dq = dq * 1.01
        if fault == "one tile of dq times 1.003":
            dq[:, :, 64:128] *= 1.003
        dk, dv = (
            x.view(B, Hk, H // Hk, N, -1).sum(2)
            for x in (ds.mT @ q.float() * sm_scale, p.mT @ dout)
        )
        return None, None, None, None, *(x.to(q.dtype) for x in (dq, dk, dv))


def _cast(x, dtype):
    return x.to(dtype).float()
