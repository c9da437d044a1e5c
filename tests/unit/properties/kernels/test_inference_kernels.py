"""Kernels for inference: packed sequences, one query, a fixed scale, always a causal mask.

Each planted fault is one that a kernel of that kind can have, and ``verify`` finds it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from fa_verify import attention_kernel, verify
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.packing import Packing
from fa_verify.properties.kernels.subject import Subject

GUARANTEES = ("G1", "G3", "G4", "G9", "G13")
FORWARD = {"dtypes": ("fp32",), "backward": False, "p_dtype": "fp32", "p_normalised": True}


def softmax(scores: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P and lse of scores, with P = 0 and lse = -inf for rows that see nothing."""
    scores = scores.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(empty, 0.0), scores.logsumexp(-1)


def packed(
    *, neighbour: bool = False, beyond: bool = False, causal_at: str = "bottom-right"
) -> Callable:
    """A varlen kernel. ``neighbour`` sees the first key of the next sequence, ``beyond`` reads it.

    ``beyond`` multiplies the key after the last one of a sequence by a weight of 0.
    """

    @attention_kernel(varlen=True, masks=("causal", "padding"), **FORWARD)
    def attention(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        group = q.shape[1] // k.shape[1]
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
        ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
        before = (0, 0)
        for after in list(ends)[1:]:
            rows = slice(before[0], after[0])
            keys = slice(before[1], after[1] + (neighbour and after[1] < len(k)))
            m, n = rows.stop - rows.start, keys.stop - keys.start
            assert m <= max_seqlen_q
            kk, vv = (x[keys].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            if beyond and n:
                vv = vv.clone()
                next_row = torch.as_strided(
                    v, v.shape[1:], v.stride()[1:], v.storage_offset() + keys.stop * v.stride(0)
                )
                vv[:, 0] += 0.0 * next_row.repeat_interleave(group, 0)
            scores = q[rows].transpose(0, 1) @ kk.mT * sm_scale
            first = n - neighbour - m if causal_at == "bottom-right" else 0
            place = torch.arange(m)[:, None] + first
            seen = torch.arange(n) <= (place if mask.causal else n)
            p, lse[:, rows] = softmax(scores, seen.expand(m, n))
            out[rows] = (p @ vv).transpose(0, 1)
            before = after
        return out, lse

    return attention


def decode(*, length: Callable = lambda n: n) -> Callable:
    """A decoding kernel on (B, H, D), whose lengths ``length`` makes wrong."""

    @attention_kernel(one_query=True, masks=("padding",), fixed_scale="1/sqrt(D)", **FORWARD)
    def attention(q, k, v, *, mask):
        B, N = k.shape[0], k.shape[2]
        lengths = torch.tensor([length(n) for n in mask.lengths(B, 1, N)[1]])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        seen = torch.arange(N) < lengths.view(-1, 1, 1, 1)
        # Keys past the end hold anything.
        k, v = (torch.where(seen.mT, x, 0.0) for x in (k, v))
        p, _ = softmax(q @ k.mT * q.shape[3] ** -0.5, seen)
        return p @ v

    return attention


def prefill(*, alignment: str = "bottom-right", scale: float | None = None) -> Callable:
    """A kernel that takes neither mask nor scale, and is always causal."""

    @attention_kernel(
        always_causal=True, masks=("causal",), m_gt_n=False, fixed_scale="1/sqrt(D)", **FORWARD
    )
    def attention(q, k, v):
        M, N, D = q.shape[2], k.shape[2], q.shape[3]
        assert M <= N
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        first = N - M if alignment == "bottom-right" else 0
        seen = torch.arange(N) <= torch.arange(M)[:, None] + first
        return softmax(q @ k.mT * (scale or D**-0.5), seen)[0] @ v

    return attention


@pytest.mark.parametrize("kernel", [packed(), decode(), prefill()], ids=["varlen", "one", "causal"])
def test_a_right_kernel_holds(kernel):
    report = verify(kernel, problems=8, guarantees=GUARANTEES, max_seqlen=40)
    assert report, str(report)
    assert report.judged > 12
    assert f"not asked in {report.judged} problems: dq, dk and dv" in report.summary


@pytest.mark.parametrize(
    "kernel",
    [
        packed(neighbour=True),
        packed(beyond=True),
        packed(causal_at="top-left"),
        decode(length=lambda n: n - 1),
        decode(length=lambda n: n + 1),
        prefill(alignment="top-left"),
        prefill(scale=0.125),
    ],
    ids=["neighbour", "beyond", "top-left", "too few", "too many", "aligned", "scale"],
)
def test_a_planted_fault_is_found(kernel):
    report = verify(kernel, problems=12, guarantees=("G1",), max_seqlen=40)
    assert report.findings, str(report)
    assert "exception" not in {finding.guarantee for finding in report.findings}


def test_what_a_guarantee_needs_and_the_kernel_has_not_is_not_asked():
    assert verify(packed(), problems=1, guarantees=("G4",)).unchecked == {
        "G4": "attention declares varlen=True"
    }
    assert verify(prefill(), problems=1, guarantees=("G3",)).unchecked == {
        "G3": "attention declares m_gt_n=False"
    }
    assert verify(decode(), problems=1, guarantees=("G5",)).unchecked == {
        "G5": "attention declares one_query=True"
    }


def test_gradients_of_packed_sequences_are_judged():
    @attention_kernel(varlen=True, masks=("padding",), dtypes=("fp32",), p_dtype="fp32")
    def right(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale):
        of_q, of_k = (
            torch.repeat_interleave(torch.arange(len(x) - 1), x.diff().long())
            for x in (cu_seqlens_q, cu_seqlens_k)
        )
        seen = (of_q[:, None] == of_k).expand(q.shape[1], -1, -1)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
        p, lse = softmax(q.transpose(0, 1) @ k.mT * sm_scale, seen)
        return (p @ v).transpose(0, 1), lse

    right.p_normalised = True
    report = verify(right, problems=8, guarantees=("G1",))
    assert report, str(report)
    assert {"dq fp32", "dk fp32", "dv fp32"} <= {*report.worst}

    @attention_kernel(varlen=True, masks=("padding",), dtypes=("fp32",), p_dtype="fp32")
    def wrong(q, k, v, **asked):
        out, lse = right(q, k, v, **asked)
        out.register_hook(lambda dout: dout * (1 + 2**-8))
        return out, lse

    wrong.p_normalised = True
    found = verify(wrong, problems=8, guarantees=("G1",)).findings
    assert {x.output for x in found} & {"dq", "dk", "dv"}


def packed_call(returned, **declared):
    """A subject that returns what a function of q and the keywords gives."""

    def attention(q, k, v, **asked):
        return returned(q, asked)

    return Subject.of(attention_kernel(varlen=True, **declared)(attention), "attention")


def test_a_varlen_kernel_gets_the_valid_rows_between_rows_of_nan():
    problem = Problem(B=2, H=2, M=5, N=7, mask=Mask(seqlens_q=(3, 1), seqlens_k=(7, 0)))
    q = torch.arange(2 * 2 * 5 * 16.0).view(2, 2, 5, 16)
    seen = {}

    def returned(q, asked):
        seen.update(asked, q=q)
        return q, q[..., 0].mT

    out, lse = packed_call(returned).run(
        q, torch.ones(2, 1, 7, 16), torch.ones(2, 1, 7, 16), problem
    )
    assert seen["q"].shape == (4, 2, 16)
    assert seen["q"][3, 1].equal(q[1, 1, 0])
    around = torch.as_strided(seen["q"], (2, 32), (5 * 32, 1), seen["q"].storage_offset() - 32)
    assert around.isnan().all()
    assert seen["cu_seqlens_q"].tolist() == [0, 3, 4]
    assert seen["cu_seqlens_k"].tolist() == [0, 7, 7]
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (3, 7)
    valid = torch.arange(5) < torch.tensor([3, 1]).view(-1, 1, 1)
    assert out.equal(torch.where(valid.unsqueeze(3), q, 0.0))
    assert lse.equal(torch.where(valid, q[..., 0], -math.inf))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda q, asked: q[:, :1], r"returns out of shape \(4, 1, 16\); needs \(4, 2, 16\)"),
        (lambda q, asked: (q, q[..., 0]), r"returns lse of shape \(4, 2\); needs \(2, 4\)"),
        (lambda q, asked: (q, q, q), "returns 3 values"),
        (lambda q, asked: None, "returns NoneType as out"),
    ],
)
def test_a_varlen_kernel_that_returns_another_form_is_told(returned, says):
    problem = Problem(B=2, H=2, M=5, mask=Mask(seqlens_q=(3, 1)))
    q, k = torch.ones(2, 2, 5, 16), torch.ones(2, 1, 1, 16)
    with pytest.raises(AssertionError, match=says):
        packed_call(returned).run(q, k, k, problem)


def test_keywords_are_those_that_the_declarations_leave():
    def of(call, **declared):
        return Subject.of(attention_kernel(**declared)(call), "attention").keywords

    assert of(lambda q, k, v, *, mask, sm_scale: q) == ("mask", "sm_scale")
    assert of(lambda q, k, v, *, mask: q, fixed_scale=0.5) == ("mask",)
    assert of(lambda q, k, v: q, fixed_scale=0.5, masks=()) == ()
    assert of(lambda q, k, v, *, mask: q, fixed_scale=0.5, masks=()) == ("mask",)
    # The kernel is not always causal, so it has to take the mask.
    assert of(lambda q, k, v: q, fixed_scale=0.5, masks=("causal",)) == ("mask",)
    assert of(lambda q, k, v: q, fixed_scale=0.5, masks=("causal",), always_causal=True) == ()


def test_a_signature_without_a_keyword_that_is_asked_is_refused(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("def attention(q, k, v):\n    return q\n\nattention.fixed_scale = 1.0\n")
    with pytest.raises(ValueError, match=r"takes \(q, k, v\); needs \(q, k, v, \*, mask\)"):
        load(f"{path}:attention")
    path.write_text(path.read_text() + "attention.masks = ()\n")
    assert load(f"{path}:attention").keywords == ()


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"always_causal": True, "masks": ("window",)}, "needs 'causal', as always_causal is"),
        ({"varlen": True, "score_mods": ("bias",)}, "varlen=True needs one without"),
    ],
)
def test_declarations_that_contradict_each_other_are_refused(declared, says):
    with pytest.raises(ValueError, match=says):
        attention_kernel(**declared)(lambda q, k, v, *, mask, sm_scale: q)


def test_a_kernel_of_the_tutorials_signature_takes_a_scale():
    def attention(q, k, v, causal, sm_scale):
        return q

    attention.fixed_scale = 0.5
    with pytest.raises(ValueError, match=r"declares fixed_scale=0\.5, but takes \(q, k, v, causal"):
        Subject.of(attention, "attention")


def test_a_given_problem_is_narrowed_to_one_that_is_supported():
    given = Problem(B=2, M=9, N=5, mask=Mask(seqlens_q=(9, 2), seqlens_k=(1, 4)), sm_scale=2.0)
    for kernel in (prefill(), decode(), packed()):
        subject = Subject.of(kernel, "attention")
        subject = dataclasses.replace(subject, masks=("causal", "padding"))
        assert subject.excludes(narrowed(subject, given)) is None
    everything = Subject.of(lambda q, k, v, *, mask, sm_scale: q, "attention")
    assert narrowed(everything, given) == given


def test_packing_back_is_the_identity_on_valid_rows():
    of = Packing.of((3, 0, 4), 4, torch.device("cpu"))
    x = torch.randn(3, 2, 4, 5)
    valid = torch.arange(4) < torch.tensor([3, 0, 4]).view(-1, 1, 1)
    assert of.padded(of.packed(x)).equal(x)
    assert of.padded(of.valid(x)).equal(torch.where(valid.unsqueeze(3), x, 0.0))
    assert (of.total, of.longest, of.cu_seqlens().tolist()) == (7, 4, [0, 3, 3, 7])
