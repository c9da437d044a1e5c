"""FlashAttention-2 in PyTorch, untiled: float32 between casts, as on a GPU.

``benchmarks.power`` measures with it, because it tells the values before their last rounding.
"""

from __future__ import annotations

import math

import torch

from fa_verify.properties.kernels.attention_kernel import attention_kernel

__all__ = ["UNROUNDED", "attention", "attention_tf32"]

# The float32 results of the last call and its gradients, by output.
UNROUNDED: dict[str, torch.Tensor] = {}
LOG2E = math.log2(math.e)
DTYPES = ("fp16", "bf16", "fp32")


@attention_kernel(
    dtypes=DTYPES,
    masks=(),
    gqa=False,
    zero_sizes=False,
    returns_lse=True,
    backward_reads=("out", "lse"),
)
def attention(q, k, v, *, mask, sm_scale):
    """Returns (out, lse)."""
    return _Attention.apply(lambda x: x.to(q.dtype).float(), sm_scale, q, k, v)


@attention_kernel(
    dtypes=("fp32",), masks=(), gqa=False, zero_sizes=False, returns_lse=True,
    dots="tf32", tf32_conversion="nearest", backward_reads=("out", "lse"),
)  # fmt: skip
def attention_tf32(q, k, v, *, mask, sm_scale):
    """Returns (out, lse); the operands of every dot are rounded to TF32."""
    return _Attention.apply(_tf32, sm_scale, q, k, v)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds finite float32 numbers to 10 bits after the leading one, ties to even."""
    bits = x.contiguous().view(torch.int32)
    even = (bits >> 13) & 1
    return ((bits + 0xFFF + even) & ~0x1FFF).view(torch.float32)


class _Attention(torch.autograd.Function):
    """``cast`` rounds the operands of every dot, P and dS among them."""

    @staticmethod
    def forward(ctx, cast, sm_scale, q, k, v):
        scores = cast(q) @ cast(k).mT * (sm_scale * LOG2E)
        m = scores.amax(3, keepdim=True)
        p = torch.exp2(scores - m)
        total = p.sum(3, keepdim=True)
        UNROUNDED["out"] = (cast(p) @ cast(v) / total).detach()
        out = UNROUNDED["out"].to(q.dtype)
        lse = ((m + total.log2()) / LOG2E).squeeze(3)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = cast, sm_scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        cast, sm_scale = ctx.given
        p = torch.exp2(cast(q) @ cast(k).mT * (sm_scale * LOG2E) - (lse * LOG2E).unsqueeze(3))
        delta = (out.float() * dout.float()).sum(3, keepdim=True)
        ds, p = (cast(x) for x in (p * (cast(dout) @ cast(v).mT - delta), p))
        dq, dk, dv = ds @ cast(k) * sm_scale, ds.mT @ cast(q) * sm_scale, p.mT @ cast(dout)
        UNROUNDED.update(dq=dq, dk=dk, dv=dv)
        return None, None, *(x.to(q.dtype) for x in (dq, dk, dv))
