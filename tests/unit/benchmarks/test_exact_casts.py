"""The casts alone explain the errors of kernels in 16 bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.exact_casts import exact_casts, rounded_once
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_subject
from tests.unit.fa_verify.probing.black_boxes import kernel

PROBLEM = Problem(H=2, Hk=2, M=200, N=200, D=64, Dv=64, dtype="bf16", inputs="times8")
# The width of a tile that holds all keys: online softmax casts weights of other sizes.
WHOLE = 256


def error(of, want):
    return [float((x.double() - y).square().mean().sqrt()) for x, y in zip(of, want, strict=True)]


def oracle(problem):
    inputs = make(problem)
    want = torch_reference.attention(*inputs.tensors, mask=problem.mask, sm_scale=problem.scale)
    return inputs, want


@pytest.mark.parametrize(
    ("how", "declared"),
    [
        ({}, {}),
        ({"p": "normalised"}, {"p_normalised": True}),
        ({"ds_scaled": True}, {"ds_scaled": True}),
        ({"ds_from_cast": True}, {"ds_from": "rounded"}),
        ({"l_rounded": True}, {"l_from": "rounded"}),
        ({"prescale": "k"}, {"prescales": "k"}),
        ({"prescale": "q"}, {"prescales": "q"}),
        ({"prescale": "qk"}, {"prescales": "qk"}),
        ({"p": "fp32"}, {"p_dtype": "fp32"}),
    ],
)
def test_a_kernel_errs_as_its_casts_do(how, declared):
    # A scale that is no power of two, so that prescaling rounds.
    problem = dataclasses.replace(PROBLEM, sm_scale=0.1)
    inputs, want = oracle(problem)
    subject = Subject.of(kernel(width=WHOLE, lse="e", **how), "kernel")
    numerics = Numerics(backward_reads=("out", "lse"), **declared)
    got = error(run_subject(subject, problem, inputs), want)
    casts = error(exact_casts(problem, inputs, numerics), want)
    for name, mine, alone in zip(("out", "dq", "dk", "dv"), got[:1] + got[2:],
                                 casts[:1] + casts[2:], strict=True):  # fmt: skip
        assert mine == pytest.approx(alone, rel=0.03), name


def test_without_casts_each_output_is_rounded_once():
    inputs, want = oracle(PROBLEM)
    exact = exact_casts(PROBLEM, inputs, Numerics(p_dtype="fp32"))
    for found, once in zip(exact, rounded_once(want, "bf16"), strict=True):
        # A tie of the oracle's own last bit may fall to either side.
        assert (found != once).double().mean() < 1e-4


def test_tf32_rounds_the_operands_of_fp32():
    problem = dataclasses.replace(PROBLEM, dtype="fp32")
    inputs, want = oracle(problem)
    whole, short = (
        error(exact_casts(problem, inputs, Numerics(dots=dots)), want)[0]
        for dots in ("ieee", "tf32")
    )
    assert whole < 2.0**-22 * want.out.abs().max()
    assert 2.0**-13 < short / want.out.double().square().mean().sqrt() < 2.0**-6


def test_lse_is_rounded_to_float32():
    _, want = oracle(PROBLEM)
    once = rounded_once(want, "bf16")
    assert torch.equal(once.lse, want.lse.float().double())
    assert torch.equal(once.out, want.out.float().bfloat16().double())
