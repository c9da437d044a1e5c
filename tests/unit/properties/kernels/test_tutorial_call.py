"""Kernels with the signature of Triton's tutorial are recognised, called and verified."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.tutorial_call import tutorial_call
from fa_verify.verification import verify

ROOT = Path(__file__).parents[4]
# A user's file with the arguments and the assertions of the tutorial's kernel.
KERNEL = """
import torch


class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize=True):
        assert q.shape == k.shape == v.shape and q.shape[2] % 16 == 0
        assert all(x.is_contiguous() for x in (q, k, v))
        scores = q.float() @ k.float().mT * sm_scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) & causal
        p = torch.softmax(scores.masked_fill(hidden, float("-inf")), 3).masked_fill(hidden, 0.0)
        ctx.save_for_backward(q, k, v, p, hidden)
        ctx.sm_scale = sm_scale
        return (p.to(v.dtype).float() @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, hidden = ctx.saved_tensors
        assert do.is_contiguous()
        dp = (do.float() @ v.float().mT).masked_fill(hidden, 0.0)
        ds = p * (dp - (dp * p).sum(3, keepdim=True))
        low = ds.masked_fill(hidden, 0.0).to(q.dtype).float()
        dq = low @ k.float() * ctx.sm_scale
        dk = low.mT @ q.float() * ctx.sm_scale
        dv = p.to(q.dtype).mT.float() @ do.float()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


attention = _attention.apply
_attention.seqlen_multiple = 16
_attention.dtypes = ("bf16", "fp32")
_attention.p_normalised = True
"""


class Scaled(torch.autograd.Function):
    """q times the scale, or its negative under a causal mask."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize=True):
        return q * (-sm_scale if causal else sm_scale)


class OfNewStyle(Scaled):
    @staticmethod
    def forward(q, k, v, causal, sm_scale):
        return q

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def plain(q, k, v, causal, sm_scale):
    return q * (-sm_scale if causal else sm_scale)


def swapped(a, b, c, sm_scale, causal=False, *rest, **more):
    return a * (-sm_scale if causal else sm_scale)


def renamed(Q, K, V, is_causal, softmax_scale):
    return Q * (-softmax_scale if is_causal else softmax_scale)


def of_subjects(q, k, v, *, mask, sm_scale):
    return q


def with_more(q, k, v, causal, sm_scale, dropout):
    return q


def with_less(q, k, v, sm_scale):
    return q


def by_name(q, k, v, *, causal, sm_scale):
    return q


@pytest.mark.parametrize(
    "call",
    [plain, swapped, renamed, Scaled.apply, OfNewStyle.apply, partial(with_more, dropout=0.0)],
)
def test_the_signature_is_recognised(call):
    assert tutorial_call(call) is not None


@pytest.mark.parametrize("call", [of_subjects, with_more, with_less, by_name, print, 3])
def test_other_signatures_are_left_alone(call):
    assert tutorial_call(call) is None


@pytest.mark.parametrize("call", [plain, swapped, renamed, Scaled.apply])
@pytest.mark.parametrize(("mask", "sign"), [(Mask(), 1), (Mask(causal=True), -1)])
def test_causal_and_scale_arrive_where_they_belong(call, mask, sign):
    q = torch.ones(1, 1, 2, 16)
    out, lse = Subject.of(call, "f").run(q, q, q, Problem(M=2, N=2, mask=mask, sm_scale=0.25))
    assert lse is None
    assert out.eq(0.25 * sign).all()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(M=2, N=3),
        Problem(H=2),
        Problem(Dv=8),
        Problem(N=0, M=0),
        Problem(M=2, N=2, mask=Mask(window_left=1)),
        Problem(M=2, N=2, mask=Mask(seqlens_k=(1,))),
        Problem(layouts=("bshd", "bhsd", "bhsd", "bhsd")),
    ],
    ids=str,
)
def test_features_that_the_signature_lacks_are_declared_unsupported(problem):
    assert Subject.of(plain, "f").excludes(problem).startswith("f declares ")


def test_the_kernel_can_declare_more_than_the_signature():
    def attention(q, k, v, causal, sm_scale):
        return q

    attention.gqa = True
    attention.m_ne_n = True
    attention.causal_alignment = "bottom-right"
    subject = Subject.of(attention, "f")
    assert subject.excludes(Problem(H=2, M=2, N=3, mask=Mask(causal=True))) is None


def test_declarations_stand_on_the_class_behind_apply():
    class Declared(Scaled):
        head_dims = (64,)

    assert Subject.of(Declared.apply, "f").head_dims == (64,)
    assert Subject.of(Declared.apply, "f").backward is True


def test_a_misspelt_declaration_of_the_class_is_refused():
    class Misspelt(Scaled):
        head_dim = (64,)

    with pytest.raises(ValueError, match=r"^f declares 'head_dim' \(did you mean 'head_dims'\?\)"):
        Subject.of(Misspelt.apply, "f")


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (
            "masks",
            ("causal", "window"),
            r"declares masks \['window'\], but takes \(q, k, v, causal",
        ),
        ("configs", {"a": {}, "b": {}}, r"declares configs, but takes .*: no config"),
    ],
)
def test_declaring_what_cannot_be_passed_is_refused(word, value, says):
    def attention(q, k, v, causal, sm_scale):
        return q

    setattr(attention, word, value)
    with pytest.raises(ValueError, match=f"^f {says}"):
        Subject.of(attention, "f")


def test_the_declarations_say_what_was_adapted():
    said = Subject.of(Scaled.apply, "f").declared()
    assert "takes='(q, k, v, causal, sm_scale, warp_specialize=True)'" in said
    assert "takes" not in Subject.of(of_subjects, "f").declared()


def kernel_of(text: str):
    found: dict[str, object] = {}
    exec(text, found)  # runs the text as another test suite would
    return found["attention"]


def test_such_a_kernel_is_verified_inside_another_suite():
    report = verify(kernel_of(KERNEL), problems=2, guarantees=("G1", "G5", "G8"), max_seqlen=32)
    assert report, str(report)
    assert report.judged > 5


def test_undeclared_limitations_of_a_tutorial_kernel_are_found():
    undeclared = kernel_of(KERNEL.replace("_attention.seqlen_multiple = 16", ""))
    report = verify(undeclared, problems=1, guarantees=("G1",), max_seqlen=32)
    assert not report
    assert {finding.guarantee for finding in report.findings} == {"exception"}
    assert "AssertionError" in report.findings[0].raised


def test_such_a_file_is_verified_from_the_command_line(tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(KERNEL)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--kernel={path}:attention",
        "--hypothesis-profile=dev", "-k",
        "bf16 and d16 and (strides_give or derived_bound or hidden_positions)",
    ]  # fmt: skip
    inherited = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    assert "takes='(q, k, v, causal, sm_scale, warp_specialize=True)'" in done.stdout
    assert re.search(r"\n\d+ distinct problems judged on .*; 0 unsupported", done.stdout)
