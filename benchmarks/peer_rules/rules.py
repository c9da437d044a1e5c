"""The tolerance rules by which other projects test their attention kernels.

Each rule reimplements a test with its factors, tolerances and references, so that it can judge any
kernel's outputs on any inputs. An output without elements passes; no suite tests one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.peer_rules.case import (
    CUDNN,
    CUDNN_V2,
    EAGER,
    TUTORIAL,
    UPCAST,
    XFORMERS,
    Case,
)
from fa_verify.oracles.outputs import OUTPUTS, Outputs

__all__ = ["RULES", "Rule"]

FP32 = torch.float32
COMPARED = ("out", "dq", "dk", "dv")

Judge = Callable[[Case], dict[str, bool]]


@dataclass(frozen=True)
class Rule:
    """A suite's rule.

    Args:
        name: Name of the rule, the key of its suite's inputs.
        source: Repositories, paths, commits and tests that the rule follows.
        judge: Returns whether each output passes that the suite compares and the kernel has.
        dtypes: The suite's dtypes, a subset of ``fa_verify.oracles.problem.DTYPES``.
    """

    name: str
    source: str
    judge: Judge
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, judge: Judge, *dtypes: str) -> Rule:
        """Makes a rule whose source is the last paragraph of the judge's docstring."""
        text = inspect.getdoc(judge) or ""
        return cls(judge.__name__, " ".join(text.partition("Source: ")[2].split()), judge, dtypes)


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


RULES: tuple[Rule, ...] = (
    Rule.of(flash_attention_output, "fp16", "bf16"),
    Rule.of(flash_attention_causal, "fp16", "bf16"),
    Rule.of(flash_attention_triton, "fp16", "bf16"),
    Rule.of(flash_attention_3, "fp16", "bf16"),
    Rule.of(pytorch_sdpa_flash, "fp16", "bf16"),
    Rule.of(pytorch_sdpa_efficient, "fp16", "bf16", "fp32"),
    Rule.of(flex_attention, "fp16", "bf16", "fp32"),
    Rule.of(triton_tutorial, "fp16"),
    Rule.of(xformers, "fp16", "bf16", "fp32"),
    Rule.of(cudnn_frontend, "fp16", "bf16"),
    Rule.of(cudnn_frontend_v2, "fp16", "bf16"),
)
