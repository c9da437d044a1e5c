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
    "one tile of P times 1 + 2**-9",
    "one tile of dS times 1 + 2**-9",
    "k converted in another way",
)


class FlashAttention2:
    """Attention whose backward reads out and lse; float32 between 16-bit inputs and outputs."""

    returns_lse = True
    devices = ("cpu",)
    backward_reads = ("out", "lse")

    def __init__(
        self, fault: str = "", keeps_sums: bool = False, tf32_conversion: str = "unknown"
    ) -> None:
        """With ``keeps_sums``, the backward reads a row's maximum and sum in place of lse.

        With ``tf32_conversion``, dots run as on TF32 tensor cores: they convert their operands,
        and truncate the sum after every 4 products.
        """
        assert fault in ("", *FAULTS)
        self.fault = fault
        self.keeps_sums = keeps_sums
        self.tf32_conversion = tf32_conversion
        self.dots = "ieee" if tf32_conversion == "unknown" else "tf32"

    def __call__(self, q, k, v, *, mask, sm_scale):
        dots = self.fault, self.tf32_conversion
        return _Attention.apply(*dots, self.keeps_sums, mask, sm_scale, q, k, v)


def _to_tf32(x, conversion):
    bits = x.contiguous().view(torch.int32)
    half = {"nearest": 0xFFF + ((bits >> 13) & 1), "nearest_away": 0x1000}.get(conversion, 0)
    return ((bits + half) & ~0x1FFF).view(torch.float32)


def _dot(a, b, conversion, conversion_of_b=None):
    """Returns a @ b in float32, or as TF32 tensor cores compute it."""
    if conversion == "unknown":
        return a @ b
    a = _to_tf32(a, conversion).double()
    b = _to_tf32(b, conversion_of_b or conversion).double()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], 4):
        exact = total + a[..., start : start + 4] @ b[..., start : start + 4, :]
        near = exact.float()
        toward_0 = torch.nextafter(near, torch.zeros_like(near))
        total = torch.where(near.double().abs() > exact.abs(), toward_0, near).double()
    return total.float()


def _scores(q, k, mask, sm_scale, conversion, of_k=None):
    """Returns scores in base 2, (B, H, M, N), -inf where hidden."""
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    seen = mask.dense(B, H, M, N)
    keys = k.float().repeat_interleave(H // Hk, 1)
    scores = _dot(q.float(), keys.mT, conversion, of_k)
    return (scores * (sm_scale * LOG2E)).masked_fill(~seen, -math.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fault, conversion, keeps_sums, mask, sm_scale, q, k, v):
        scores = _scores(q, k, mask, sm_scale, conversion)
        m = scores.amax(3, keepdim=True)
        m = m.masked_fill(m == -math.inf, 0.0)
        p = torch.exp2(scores - m)
        total = p.sum(3, keepdim=True)
        values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = _dot(p.to(q.dtype).float(), values, conversion)
        out = out / total.masked_fill(total == 0, 1.0)
        lse = ((m + total.log2()) / LOG2E).squeeze(3)
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse)
        ctx.sums = (m, total) if keeps_sums else None
        ctx.given = fault, conversion, mask, sm_scale
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        fault, conversion, mask, sm_scale = ctx.given
        (B, H, _, _), (Hk, N) = q.shape, k.shape[1:3]
        keys, values = (x.float().repeat_interleave(H // Hk, 1) for x in (k, v))
        dout = dout.float().masked_fill((lse == -math.inf).unsqueeze(3), 0.0)
        base = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
        another = "nearest" if fault == "k converted in another way" else None
        scores = _scores(q, k, mask, sm_scale, conversion, another)
        p = torch.exp2(scores - base.unsqueeze(3))
        if ctx.sums is not None:
            m, total = ctx.sums
            p = torch.exp2(scores - m) / total.masked_fill(total == 0, 1.0)
        products = out.float() * dout
        if fault == "delta of rounded products":
            products = products.to(q.dtype).float()
        ds = p * (_dot(dout, values.mT, conversion) - products.sum(3, keepdim=True))
        if fault == "dS cast twice":
            ds = _cast(ds * sm_scale, q.dtype) / sm_scale
        if fault == "dS cast to fp16":
            ds = _cast(ds, torch.float16)
        if fault == "P cast to fp16":
            p = _cast(p, torch.float16)
        for x, name in ((p, "P"), (ds, "dS")):
            if fault == f"one tile of {name} times 1 + 2**-9":
                x[:, :, :64, :64] *= 1 + 2.0**-9
        p, ds = (_cast(x, q.dtype) for x in (p, ds))
        dq = _dot(ds, keys, conversion) * sm_scale
        if fault == "dq times 1.01":
            dq = dq * 1.01
        if fault == "one tile of dq times 1.003":
            dq[:, :, 64:128] *= 1.003
        dk, dv = (
            x.view(B, Hk, H // Hk, N, -1).sum(2)
            for x in (
                _dot(ds.mT, q.float(), conversion) * sm_scale, _dot(p.mT, dout, conversion)
            )
        )  # fmt: skip
        return None, None, None, None, None, *(x.to(q.dtype) for x in (dq, dk, dv))


def _cast(x, dtype):
    return x.to(dtype).float()
