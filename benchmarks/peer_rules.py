"""The tolerance rules by which other projects test their attention kernels.

Each rule reimplements a test with its factors, tolerances and references, so that it can judge any
kernel's outputs on any inputs. An output without elements passes; no suite tests one. A table on
docs/mutation-testing.md compares the rules with the checks of this project.

References run on PyTorch for the CPU, also where a suite computes them on a GPU. They read zeros in
padding, because most suites pack sequences and have no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["CUDNN", "CUDNN_V2", "EAGER", "RULES", "TUTORIAL", "UPCAST", "XFORMERS", "Case", "Eager"]

FP32 = torch.float32
COMPARED = ("out", "dq", "dk", "dv")


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


def _judged(
    got: Outputs[torch.Tensor | None],
    passes: Callable[[str, torch.Tensor], bool],
    outputs: tuple[str, ...] = COMPARED,
) -> dict[str, bool]:
    """The verdict of ``passes`` on every output that the kernel has."""
    named = {name: getattr(got, name) for name in outputs}
    return {name: not x.numel() or passes(name, x) for name, x in named.items() if x is not None}


def _farthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in the promoted dtype; NaN if any element is NaN."""
    return (a - b).abs().max().item()


def _close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    atol: float,
    rtol: float,
    equal_nan: bool = False,
) -> bool:
    """Whether |actual - expected| <= atol + rtol |expected| everywhere, as in torch.allclose."""
    dtype = torch.promote_types(actual.dtype, expected.dtype)
    return torch.allclose(
        actual.to(dtype), expected.to(dtype), atol=atol, rtol=rtol, equal_nan=equal_nan
    )


def _multiple_of_eager(
    case: Case,
    factor: Callable[[str], float],
    atol: Callable[[torch.Tensor], float] = lambda truth: 0.0,
    zero_rows: bool = True,
) -> dict[str, bool]:
    """Whether the largest error <= factor * (largest error of eager in 16 bits) + atol(truth)."""
    truth, low = (
        case.blanked(case.eager(replace(form, zero_rows=zero_rows))) for form in (UPCAST, EAGER)
    )

    def passes(name: str, x: torch.Tensor) -> bool:
        right, eager = getattr(truth, name), getattr(low, name)
        return _farthest(x, right) <= factor(name) * _farthest(eager, right) + atol(right)

    return _judged(case.blanked(case.got), passes)


def flash_attention_output(case: Case) -> dict[str, bool]:
    """Error of out at most 2, of gradients at most 3 times that of eager PyTorch in 16 bits.

    Both are maxima over the tensor, against float32 rounded to the dtype. Any NaN fails, also one
    in the reference. Empty rows are 0 in the references. Padding is unpacked to zeros before the
    comparison, so the suite does not see what a kernel writes there.

    Source: liangel-02/flash-attention (a fork of Dao-AILab/flash-attention),
    tests/test_flash_attn.py, 2c2c24c29ddde1c0ec7ef3b7da6e85fc2c645af7, test_flash_attn_output and
    test_flash_attn_varlen_output.
    """
    return _multiple_of_eager(case, lambda name: 2.0 if name == "out" else 3.0)


def flash_attention_causal(case: Case) -> dict[str, bool]:
    """Error at most twice that of eager PyTorch in 16 bits, plus 1e-5.

    References, NaN, empty rows and padding are treated as in ``flash_attention_output``.

    Source: Dao-AILab/flash-attention, tests/test_flash_attn.py,
    765fbd928364e298a38a5e4b5c540d30daa1aecb, test_flash_attn_causal.
    """
    return _multiple_of_eager(case, lambda name: 2.0, lambda truth: 1e-5)


def flash_attention_triton(case: Case) -> dict[str, bool]:
    """Error at most twice that of eager PyTorch in 16 bits: the test of its Triton kernel.

    It equals ``flash_attention_output`` but for empty rows, which are NaN in the references, so
    that every kernel fails there. The suite has none: its causal mask is aligned to the top left.

    Source: Dao-AILab/flash-attention, tests/test_flash_attn.py,
    008951f1d94a29eaeee48d25dbfa11df1ba12413, test_flash_attn_triton.
    """
    return _multiple_of_eager(case, lambda name: 2.0, zero_rows=False)


def flash_attention_3(case: Case) -> dict[str, bool]:
    """Error at most twice that of eager PyTorch, plus 2 max |x + 0.3 - 0.3 - x| of the truth x.

    That term is computed in the dtype and is about twice the spacing at x. References, NaN, empty
    rows and padding are treated as in ``flash_attention_output``.

    Source: Dao-AILab/flash-attention, hopper/test_flash_attn.py,
    e7f8a55c9840154965d620c16b3dab1209bbea2b, test_flash_attn_output, and hopper/test_util.py,
    c082294e0f6c01d46318694a6f3e0274225a9683, attention_ref.
    """
    return _multiple_of_eager(
        case, lambda name: 2.0, lambda truth: 2 * _farthest(truth + 0.3 - 0.3, truth)
    )


def _within_threshold(
    case: Case, golden: Outputs[torch.Tensor], factors: dict[str, float]
) -> dict[str, bool]:
    """Whether the largest error <= max(1e-5, factor * largest error of the composite backend)."""
    low = case.math(case.inputs.q.dtype)

    def passes(name: str, x: torch.Tensor) -> bool:
        right = getattr(golden, name)
        error, allowed = _farthest(right, x), _farthest(right, getattr(low, name))
        if math.isnan(error) and not math.isnan(allowed):
            return False
        return not error > max(1e-5, factors[name] * allowed)

    return _judged(case.got, passes)


def pytorch_sdpa_flash(case: Case) -> dict[str, bool]:
    """Error at most 4 (out, dv), 16 (dk), 180 (dq) times that of the composite backend, or 1e-5.

    Both are maxima over the tensor, against the composite backend in the next wider dtype. A NaN
    fails, unless the references have one in the same tensor: then every error is NaN and passes.
    Empty rows are 0 in the references.

    Source: gkanugula-nv/pytorch (a fork of pytorch/pytorch), test/test_transformers.py,
    4e7f1afe47066cc2039857575c1396d1a0a9a81b, check_out_and_grad and
    test_flash_attention_vs_math_ref_grads.
    """
    wider = torch.float64 if case.inputs.q.dtype == FP32 else FP32
    factors = {"out": 4.0, "dq": 180.0, "dk": 16.0, "dv": 4.0}
    return _within_threshold(case, case.math(wider), factors)


def pytorch_sdpa_efficient(case: Case) -> dict[str, bool]:
    """Error at most 3 (out), 8.5 (dv), 25 (dk), 150 (dq) times that of the composite, or 1e-5.

    The comparison is that of ``pytorch_sdpa_flash``, against float64.

    Source: gkanugula-nv/pytorch (a fork of pytorch/pytorch), test/test_transformers.py,
    4e7f1afe47066cc2039857575c1396d1a0a9a81b, check_out_and_grad and
    test_mem_efficient_attention_vs_math_ref_grads.
    """
    return _within_threshold(case, case.want, {"out": 3.0, "dq": 150.0, "dk": 25.0, "dv": 8.5})


def flex_attention(case: Case) -> dict[str, bool]:
    """Mean error at most 1.1 times that of the eager form in the dtype; 10 times in float32.

    Errors are means over the tensor, against float64. The LSE, in base 2, is within 2e-2 +
    2e-2 |x|. A NaN fails, also one in the reference. Empty rows are 0 and -inf in the references.

    Source: pytorch/pytorch, test/inductor/test_flex_attention.py,
    00125ef3dad64a9f8dd8768e81326a34ed7ba91d, _check_equal and _check_out_and_grad, and
    195dbb58a8a2f05c6f1e1d7d3b88785f6606da33, test_logsumexp_correctness.
    """
    factor = 10.0 if case.inputs.q.dtype == FP32 else 1.1

    def passes(name: str, x: torch.Tensor) -> bool:
        golden = getattr(case.want, name)
        if name == "lse":
            base2 = (golden * math.log2(math.e)).to(FP32), (x * math.log2(math.e)).to(FP32)
            return _close(*base2, atol=2e-2, rtol=2e-2)
        error, allowed = ((golden - y).abs().mean().item() for y in (x, getattr(case.flex, name)))
        return error <= allowed * factor

    return _judged(case.got, passes, OUTPUTS)


def triton_tutorial(case: Case) -> dict[str, bool]:
    """Every element within 1e-2 of eager PyTorch in the dtype, whatever its size.

    A NaN fails, also one in the reference. An empty row is NaN in the reference's out and makes all
    of the reference's dv NaN. Every kernel fails there; the suite has no empty row.

    Source: triton-lang/triton, python/tutorials/06-fused-attention.py,
    dc6ee3ed2cf9b2b436544d6153351f9bc679cc61, and triton-lang/Triton-to-tile-IR, same path,
    09deb2ab438b891811c8c8cd7dc463ef9e1c0351, test_op.
    """
    reference = case.eager(TUTORIAL)
    return _judged(
        case.got, lambda name, x: _close(x, getattr(reference, name), atol=1e-2, rtol=0.0)
    )


_XFORMERS_FORWARD = {  # atol, rtol
    torch.float32: (3e-4, 2e-5),
    torch.float16: (4e-3, 4e-4),
    torch.bfloat16: (2e-2, 5e-3),
}
_XFORMERS_BACKWARD = {
    torch.float32: (9e-4, 1e-4),
    torch.float16: (0.2, 2e-2),
    torch.bfloat16: (0.9, 0.1),
}


def xformers(case: Case) -> dict[str, bool]:
    """Every element within the operators' default atol + rtol |x| of float32, by dtype.

    Gradients are compared in the dtype; the LSE is within 2e-4 + 1e-5 |x|. A NaN fails, also one in
    the reference. An empty row is NaN in the reference and in all its gradients, so that every
    kernel fails there; the suite has none. Sequences are packed: the suite has no padding.

    Source: facebookresearch/xformers, xformers/ops/fmha/common.py,
    a9e2e7b331cc08552835ca0acbc0e15f69b42b30, ERROR_ATOL and ERROR_RTOL;
    tests/test_mem_eff_attention.py, 687ac406347132e360de70f21ece4c48f8afefd3, test_forward,
    test_backward and test_logsumexp; for the reference, 0074bb950f16c0a2de9dd386e562ba4476ef454c,
    ref_attention.
    """
    dtype = case.inputs.q.dtype
    reference = case.blanked(case.eager(XFORMERS))

    def passes(name: str, x: torch.Tensor) -> bool:
        right = getattr(reference, name)
        if name == "lse":
            return _close(x.to(FP32), right, atol=2e-4, rtol=1e-5)
        atol, rtol = (_XFORMERS_FORWARD if name == "out" else _XFORMERS_BACKWARD)[dtype]
        return _close(x, right, atol, rtol)

    return _judged(case.blanked(case.got), passes, OUTPUTS)


def _cudnn_atol(case: Case, name: str) -> float:
    """2e-2, but 7e-2 for dk and dv in bf16."""
    wide = name in ("dk", "dv") and case.inputs.q.dtype == torch.bfloat16
    return 7e-2 if wide else 2e-2


def cudnn_frontend(case: Case) -> dict[str, bool]:
    """Every element within 2e-2 + 2e-2 |got| of float32; bf16 dk, dv within 7e-2 + 2e-2 |got|.

    The LSE is within 2e-2 + 2e-2 |got|. A NaN fails, also one in the reference. An empty row is NaN
    in the reference's out and LSE and makes all of the reference's dv NaN. Every kernel fails
    there; the suite has no empty row. Padding is set to 0 on both sides.

    Source: NVIDIA/cudnn-frontend, test/python/test_mhas.py,
    9793df569ce413f4b1844a9176f7ae24dd981603, test_sdpa and test_sdpa_backward.
    """
    eager = case.eager(CUDNN)
    # max + log(sum(exp(s - max))), where -inf - -inf is NaN
    lse = eager.lse.masked_fill(eager.lse == -math.inf, math.nan)
    reference = case.blanked(eager._replace(lse=lse))
    return _judged(
        case.blanked(case.got),
        lambda name, x: _close(getattr(reference, name), x, _cudnn_atol(case, name), 2e-2),
        OUTPUTS,
    )


def cudnn_frontend_v2(case: Case) -> dict[str, bool]:
    """Every element within 2e-2 + 2e-2 |x| of float32; bf16 dk and dv within 7e-2 + 2e-2 |x|.

    The LSE is within 2e-2 + 2e-2 |x|. A NaN passes only where the reference is NaN. Empty rows are
    0 and -inf in the reference. In padding, gradients are compared with 0 and the LSE with -inf;
    out is not compared.

    Source: NVIDIA/cudnn-frontend, test/python/sdpa/fp16.py, helpers.py and fp16_ref.py,
    b8c0656e6f6c84fc194f4d57329b55d609eff596, compute_and_compare_reference, approx_equal and
    compute_ref.
    """
    reference = case.eager(CUDNN_V2)
    got = case.got._replace(out=case.blanked(case.got).out)
    return _judged(
        got,
        lambda name, x: _close(
            x.to(FP32), getattr(reference, name), _cudnn_atol(case, name), 2e-2, equal_nan=True
        ),
        OUTPUTS,
    )


# Each says in its docstring which repositories, paths, commits and tests it follows, and returns
# whether each output passes that the suite compares and the kernel has.
RULES: tuple[Callable[[Case], dict[str, bool]], ...] = (
    flash_attention_output, flash_attention_causal, flash_attention_triton, flash_attention_3,
    pytorch_sdpa_flash, pytorch_sdpa_efficient, flex_attention, triton_tutorial, xformers,
    cudnn_frontend, cudnn_frontend_v2,
)  # fmt: skip
