"""Gradients given the subject's own forward: faults that the bound of the whole accepts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import accuracy, backward, checks_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_trial
from tests.unit.properties.kernels.flash_attention_2 import FlashAttention2

LONG = Problem(M=128, N=4096, D=64, Dv=64, dtype="bf16")
LONGER = Problem(M=16, N=16_384, D=64, Dv=64, dtype="fp16")
CAUSAL = Problem(
    B=2, H=4, Hk=2, M=40, N=48, D=32, Dv=24, dtype="fp16",
    mask=Mask(causal=True, seqlens_q=(40, 30), seqlens_k=(33, 48)),
)  # fmt: skip
DECODE = Problem(M=1, N=512, D=32, Dv=32, dtype="fp16")
# (fault, problem, the output that shows it); the bound of the whole accepts each.
FAULTS = [
    ("dq times 1.01", LONG, "dq"),
    ("dq times 1.01", LONGER, "dq"),
    ("one tile of dq times 1.003", LONG, "dq"),
    ("delta of rounded products", CAUSAL, "dq"),
    ("delta of rounded products", dataclasses.replace(CAUSAL, dtype="bf16"), "dq"),
    ("dS cast twice", DECODE, "dk"),
    ("dS cast twice", LONGER, "dk"),
    ("dS cast to fp16", Problem(M=128, N=128, D=64, Dv=64, dtype="fp32"), "dq"),
]


def trial_of(problem: Problem, fault: str = "", **declared: object) -> AttentionTrial:
    subject = Subject.of(FlashAttention2(fault), "emulated")
    trial = run_trial(dataclasses.replace(subject, **declared), problem)
    assert trial is not None
    return trial


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("family", ["normal", "times40", "large_mean_v", "needle_visible"])
def test_a_correct_backward_passes(family: str, dtype: str) -> None:
    problem = dataclasses.replace(CAUSAL, inputs=family, dtype=dtype)
    assert backward(trial_of(problem)) == []


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "family", ["normal", "times40", "lse_low_6e3", "lse_high_6e4", "near_ties"]
)
def test_a_backward_that_keeps_the_maximum_and_the_sum_passes(family: str, dtype: str) -> None:
    problem = dataclasses.replace(CAUSAL, inputs=family, dtype=dtype)
    subject = dataclasses.replace(
        Subject.of(FlashAttention2(keeps_sums=True), "emulated"),
        numerics=Numerics(backward_reads=("out", "m_and_l")),
    )
    trial = run_trial(subject, problem)
    assert trial is not None
    assert backward(trial) == []


@pytest.mark.parametrize(("fault", "problem", "output"), FAULTS)
def test_a_fault_that_the_bound_of_the_whole_accepts_is_found(
    fault: str, problem: Problem, output: str
) -> None:
    assert backward(trial_of(problem)) == []
    trial = trial_of(problem, fault)
    assert accuracy(trial) == []
    assert output in [finding.output for finding in backward(trial)]


@pytest.mark.parametrize("output", ["dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_one_element_among_thousands_that_is_small_and_lost_is_found(
    dtype: str, output: str
) -> None:
    trial = trial_of(dataclasses.replace(LONG, dtype=dtype))
    got = getattr(trial.got, output).clone()
    of_rms = got.double().square().mean().sqrt()
    got.view(-1)[(got.double().abs() - of_rms / 10).abs().argmin()] = 0
    (finding,) = backward(with_forward(trial, **{output: got}))
    assert (finding.output, finding.bad) == (output, 1)


def test_a_finding_names_what_was_read() -> None:
    (finding,) = backward(trial_of(LONG, "dq times 1.01"))
    message = str(finding)
    assert message.startswith(
        "backward given the forward: dq of emulated leaves the bound of a backward that reads "
        "out and lse as returned; else declare backward_reads\n"
    )
    assert "must be exact" in message


def with_forward(trial: AttentionTrial, **outputs: torch.Tensor | None) -> AttentionTrial:
    return dataclasses.replace(trial, got=trial.got._replace(**outputs))


def test_a_forward_outside_of_its_bound_is_left_to_the_other_checks() -> None:
    trial = trial_of(CAUSAL, "delta of rounded products")
    assert backward(trial)
    for name in ("out", "lse"):
        got = getattr(trial.got, name)
        for value in (math.nan, math.inf, 1e3):
            assert backward(with_forward(trial, **{name: torch.full_like(got, value)})) == []


def test_what_is_not_read_or_not_returned_is_not_conditioned_on() -> None:
    right, wrong = trial_of(CAUSAL), trial_of(CAUSAL, "delta of rounded products")
    assert backward(with_forward(wrong, lse=None))
    assert backward(with_forward(right, lse=None)) == []

    def declares(trial: AttentionTrial, *reads: str) -> AttentionTrial:
        numerics = Numerics(backward_reads=reads)
        return dataclasses.replace(
            trial, subject=dataclasses.replace(trial.subject, numerics=numerics)
        )

    # Only the output shows an error of delta.
    for reads, found in (((), False), (("out",), True), (("lse",), False)):
        assert bool(backward(declares(wrong, *reads))) == found
        assert backward(declares(right, *reads)) == []
    assert backward(with_forward(declares(wrong, "lse"), lse=None)) == []


class Automatic:
    """Attention in float64 by automatic differentiation: delta comes from the unrounded out."""

    returns_lse = True
    devices = ("cpu",)
    score_mods = ("bias",)

    def __call__(self, q, k, v, *, mask, sm_scale, bias=None):
        scores = q.double() @ k.double().mT * sm_scale
        scores = scores if bias is None else scores + bias.double()
        out = torch.softmax(scores, 3) @ v.double()
        return out.to(q.dtype), scores.detach().logsumexp(3).float()


@pytest.mark.parametrize("reads", [("out", "lse"), ()])
def test_automatic_differentiation_has_to_be_declared(reads: tuple[str, ...]) -> None:
    problem = Problem(M=24, N=2, D=16, Dv=16, dtype="bf16", bias="normal/hmn")
    subject = dataclasses.replace(
        Subject.of(Automatic(), "automatic"), numerics=Numerics(backward_reads=reads)
    )
    trial = run_trial(subject, problem)
    assert trial is not None
    assert accuracy(trial) == []
    found = [*backward(trial), *checks_of("added")["dbias"](trial)]
    assert {x.output for x in found} == ({"dq", "dk", "dv", "dbias"} if reads else set())
    assert {x.guarantee for x in found} <= {"backward given the forward"}


def test_a_forward_alone_is_not_asked() -> None:
    trial = trial_of(CAUSAL)
    subject = dataclasses.replace(trial.subject, backward=False)
    trial = with_forward(dataclasses.replace(trial, subject=subject), dq=None, dk=None, dv=None)
    assert backward(trial) == []
