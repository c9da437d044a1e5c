"""The outputs that another project's rule judges, and the references it compares them with.

References run on PyTorch for the CPU, also where a suite computes them on a GPU. They read zeros in
padding, because most suites pack sequences and have no padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["CUDNN", "CUDNN_V2", "EAGER", "TUTORIAL", "UPCAST", "XFORMERS", "Case", "Eager"]

FP32 = torch.float32


@dataclass(frozen=True, kw_only=True)
class Eager:
    """A suite's form of eager attention in plain PyTorch, with gradients by autograd.

    Args:
        inputs: Dtype of the leaf tensors. None, here and below, is the dtype of q.
        products: Dtype of the two products, of the scores and of P.
        softmax: Dtype of the softmax.
        out: Dtype of out.
        scaled: The factor that sm_scale multiplies: "q", "k" or "scores".
        added: Add -inf to hidden pairs, so that a NaN reaches every gradient.
        zero_rows: Set P of a row without a key to 0; otherwise the softmax makes it NaN.
    """

    inputs: torch.dtype | None = None
    products: torch.dtype | None = None
    softmax: torch.dtype | None = None
    out: torch.dtype | None = None
    scaled: str = "scores"
    added: bool = False
    zero_rows: bool = False


UPCAST = Eager(products=FP32, softmax=FP32, scaled="q", zero_rows=True)
EAGER = Eager(scaled="k", zero_rows=True)
TUTORIAL = Eager(softmax=FP32)
XFORMERS = Eager(products=FP32, softmax=FP32, out=FP32, scaled="q", added=True)
CUDNN = Eager(inputs=FP32, products=FP32, softmax=FP32, out=FP32)
CUDNN_V2 = replace(CUDNN, zero_rows=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """The input of a rule, with cached references.

    Args:
        inputs: q (B,H,M,D), k (B,Hk,N,D), v (B,Hk,N,Dv), dout (B,H,M,Dv).
        got: The outputs of the kernel under test; None for an output that it lacks.
        mask: The mask of the problem.
        sm_scale: Factor on q.k.
        want: The outputs in float64, which are some suites' golden values.
    """

    inputs: Inputs
    got: Outputs[torch.Tensor | None]
    mask: Mask
    sm_scale: float
    want: Outputs[torch.Tensor]
    _made: dict[Eager | torch.dtype, Outputs[torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def seen(self) -> torch.Tensor:
        """Bool (B, H, M, N), True where visible."""
        (B, H, M, _), N = self.inputs.q.shape, self.inputs.k.shape[2]
        return self.mask.dense(B, H, M, N, device=self.inputs.q.device).expand(B, H, M, N)

    @cached_property
    def padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bool (B, 1, M, 1) and (B, 1, N, 1), True in padding rows and padding keys."""
        q, k = self.inputs[:2]
        B, M, N = q.shape[0], q.shape[2], k.shape[2]
        lengths = torch.tensor(self.mask.lengths(B, M, N), device=q.device).view(2, B, 1, 1, 1)
        rows, keys = (torch.arange(size, device=q.device).view(-1, 1) for size in (M, N))
        return rows >= lengths[0], keys >= lengths[1]

    def blanked(self, outputs: Outputs[torch.Tensor | None]) -> Outputs[torch.Tensor | None]:
        """The outputs with zeros in padding, as in a suite that removes padding."""
        rows, keys = self.padding
        where = Outputs(rows, rows.squeeze(3), rows, keys, keys)
        pairs = zip(outputs, where, strict=True)
        return Outputs(*(None if x is None else x.masked_fill(empty, 0.0) for x, empty in pairs))

    @cached_property
    def clean(self) -> Inputs:
        """The inputs with zeros in padding."""
        rows, keys = self.padding
        pairs = zip(self.inputs.tensors, (rows, keys, keys, rows), strict=True)
        return Inputs(*(x.detach().masked_fill(empty, 0.0) for x, empty in pairs))

    def eager(self, form: Eager) -> Outputs[torch.Tensor]:
        """A reference in plain PyTorch, with lse in the dtype of the softmax."""
        if form not in self._made:
            self._made[form] = _eager(self, form)
        return self._made[form]

    def math(self, dtype: torch.dtype) -> Outputs[torch.Tensor]:
        """PyTorch's composite backend on inputs cast to dtype. It returns no lse; that is NaN."""
        if dtype not in self._made:
            self._made[dtype] = _sdpa_math(self, dtype)
        return self._made[dtype]

    @cached_property
    def flex(self) -> Outputs[torch.Tensor]:
        """FlexAttention without a compiler, in q's dtype."""
        return _flex(self)


def _eager(case: Case, form: Eager) -> Outputs[torch.Tensor]:
    """Attention in the form of an ``Eager``."""
    own = case.clean.q.dtype
    inputs, products, softmax, stored = (
        x or own for x in (form.inputs, form.products, form.softmax, form.out)
    )
    leaves = [x.detach().to(inputs).requires_grad_() for x in case.clean[:3]]
    q, k, v = (x.to(products) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q = q * case.sm_scale if form.scaled == "q" else q
    k = k * case.sm_scale if form.scaled == "k" else k
    scores = q @ k.mT
    scores = scores * case.sm_scale if form.scaled == "scores" else scores
    scores = scores.to(softmax)
    # A padding row keeps its scores, because its P is set to 0 in every suite that has padding.
    padding = case.padding[0]
    hidden = ~case.seen & ~padding
    masked = scores.masked_fill(hidden, -math.inf)
    if form.added:
        masked = scores + torch.where(hidden, -math.inf, 0.0)
    dead = ~case.seen.any(3, keepdim=True) if form.zero_rows else padding
    p = masked.softmax(3).to(products).masked_fill(dead, 0.0)
    out = (p @ v).to(stored)
    lse = scores.detach().masked_fill(~case.seen, -math.inf).logsumexp(3)
    return Outputs(out.detach(), lse, *torch.autograd.grad(out, leaves, case.clean.dout.to(stored)))


def _sdpa_math(case: Case, dtype: torch.dtype) -> Outputs[torch.Tensor]:
    """``scaled_dot_product_attention`` on its composite backend, in float32 for 16-bit inputs."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in case.clean[:3]]
    grouped = leaves[0].shape[1] != leaves[1].shape[1]
    given = None if bool(case.seen.all()) else case.seen
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*leaves, given, scale=case.sm_scale, enable_gqa=grouped)
    gradients = torch.autograd.grad(out, leaves, case.clean.dout.to(dtype))
    return Outputs(out.detach(), torch.full_like(case.want.lse, math.nan), *gradients)


def _flex(case: Case) -> Outputs[torch.Tensor]:
    """Forward and backward of FlexAttention's eager form; rounds P, out and dS to q's dtype.

    Source: torch 2.13.0, torch/_higher_order_ops/flex_attention.py, math_attention and
    sdpa_dense_backward.
    """
    q, k, v, dout = case.clean.tensors
    heads, work = k.shape[1], torch.promote_types(q.dtype, FP32)
    k, v = (x.repeat_interleave(q.shape[1] // heads, dim=1) for x in (k, v))
    scores = q.to(work) @ k.to(work).mT * case.sm_scale
    scores = scores.masked_fill(~case.seen, -math.inf)
    lse = scores.logsumexp(3, keepdim=True)
    dead = lse == -math.inf
    out = scores.softmax(3).masked_fill(dead, 0.0).to(q.dtype) @ v
    p = (scores - lse).exp().masked_fill(dead, 0.0)
    dp = dout.to(work) @ v.to(work).mT
    delta = (out.to(work) * dout.to(work)).sum(3, keepdim=True)
    ds = (p * (dp - delta) * case.sm_scale).to(q.dtype).masked_fill(~case.seen, 0.0)
    dk, dv = ds.mT @ q, p.to(q.dtype).mT @ dout
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    return Outputs(out, lse.squeeze(3), ds @ k, dk, dv)
