"""Causal attention with grouped heads: the forward in Triton, the backward in PyTorch."""

import torch
import triton
import triton.language as tl

from fa_verify import attention_kernel


@triton.jit
def _forward(
    q, k, v, out, lse, M, N, groups, sm_scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one head."""
    head = tl.program_id(1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    at_q = (head * M + offs_m)[:, None] * D + offs_d
    queries = tl.load(q + at_q, offs_m[:, None] < M, 0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        at_k = (head // groups * N + offs_n)[:, None] * D + offs_d
        keys = tl.load(k + at_k, offs_n[:, None] < N, 0.0)
        values = tl.load(v + at_k, offs_n[:, None] < N, 0.0)
        scores = tl.dot(queries, keys.T, input_precision="ieee") * sm_scale
        seen = (offs_n < N)[None, :]
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + N - M)
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # A row that has seen no key yet subtracts 0, not -inf.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m_i - m_safe)
        p = tl.exp(scores - m_safe[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        pv = tl.dot(p.to(values.dtype), values, input_precision="ieee")
        acc = acc + pv
        m_i = m_new
    result = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(out + at_q, result.to(out.dtype.element_ty), offs_m[:, None] < M)
    tl.store(lse + head * M + offs_m, m_i + tl.log(l_i), offs_m < M)


class _Attention(torch.autograd.Function):
    """Call the kernel, and differentiate it from its lse."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        """Return the output and its lse."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, heads, M, D = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        grid = (triton.cdiv(M, 16), batch * heads)
        groups = heads // k.shape[1]
        _forward[grid](q, k, v, out, lse, M, k.shape[2], groups, sm_scale, causal, D, 16, 32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.sm_scale = causal, sm_scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        """Return the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        M, N, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        qf, outf, df = (x.float() for x in (q, out, dout))
        kf, vf = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = qf @ kf.mT * ctx.sm_scale
        p = torch.exp(scores - lse[..., None])
        ds = p * (df @ vf.mT - (df * outf).sum(-1, keepdim=True))
        if ctx.causal:
            seen = torch.ones(M, N, dtype=torch.bool, device=q.device).tril(N - M)
            p, ds = p.masked_fill(~seen, 0), ds.masked_fill(~seen, 0)
        # Rounded before their dots, as for tensor cores.
        p, ds = (x.to(q.dtype).float() for x in (p, ds))
        dq = ds @ kf * ctx.sm_scale
        dk, dv = (
            x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ qf * ctx.sm_scale, p.mT @ df)
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


@attention_kernel(
    dtypes=("fp16", "bf16", "fp32"), head_dims=(16, 32, 64), dv_ne_d=False, masks=("causal",)
)
def attention(q, k, v, *, mask, sm_scale):
    """Return the output and its lse."""
    return _Attention.apply(q, k, v, mask.causal, sm_scale)
