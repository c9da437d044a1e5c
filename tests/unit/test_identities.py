"""The sums that must agree: they do for a correct kernel, and small shared errors break them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from oracles import stream
from oracles.mask import Mask
from oracles.problem import Problem
from properties.companions import FEWEST
from properties.compare import Finding
from properties.identities import identities, sharp_identities
from properties.tensors import make
from properties.trial import Trial
from tests.unit.test_companions import random_problem, run, share_of_bound

PROBLEM = Problem(H=4, Hk=2, M=96, N=128, D=32, Dv=24, dtype="bf16", seed=1)
PADDED = Mask(causal=True, seqlens_q=(70,), seqlens_k=(100,))


def broken(findings: list[Finding]) -> list[str]:
    """The identities that findings speak of."""
    return [re.search(r"breaks (.*?)( by more|:)", finding.claim).group(1) for finding in findings]


def scaled(trial: Trial, output: str, factor: float) -> Trial:
    got = trial.got._replace(**{output: getattr(trial.got, output) * factor})
    return replace(trial, got=got)


@pytest.mark.parametrize("seed", range(40))
def test_a_correct_kernel_is_not_flagged(seed):
    trial = run(random_problem(seed), block_n=(16, 32, 64)[seed % 3])
    assert [str(finding) for finding in identities(trial) + sharp_identities(trial)] == []


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "inputs", ["outliers", "times40", "lse_low_90", "needle_visible", "constant", "zero_k", "tiny"]
)
def test_a_correct_kernel_is_within_the_bounds_on_odd_values(inputs, dtype):
    trial = run(replace(PROBLEM, inputs=inputs, dtype=dtype, mask=PADDED))
    assert [str(finding) for finding in identities(trial)] == []


@pytest.mark.parametrize(
    ("fault", "identity"),
    [
        ("delta left out", "sum_n dk = 0"),
        ("last head of a group overwrites", "sum_n dv = sum_m dout"),
        ("dq scaled twice", "sum q.dq = sum k.dk"),
        ("accumulator not rescaled", "sum v.dv = sum out.dout"),
    ],
)
def test_each_identity_is_broken_by_a_fault_beyond_the_bounds(fault, identity):
    assert identity in broken(identities(run(replace(PROBLEM, dtype="fp32"), fault)))


@pytest.mark.parametrize(
    ("fault", "identity"),
    [
        ("delta summed in 16 bits", "sum_n dk = 0"),
        ("outputs truncated", "sum_n dv = sum_m dout"),
        ("P and dS truncated", "sum_n dv = sum_m dout"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fault_within_the_bound_breaks_a_sharp_identity(fault, identity, dtype):
    trial = run(replace(PROBLEM, dtype=dtype, M=256, Dv=64), fault)
    assert share_of_bound(trial) < 1
    assert identities(trial) == []
    assert identity in broken(sharp_identities(trial))


@pytest.mark.parametrize(
    ("output", "identity"),
    [("dq", "sum q.dq = sum k.dk"), ("out", "sum v.dv = sum out.dout")],
)
def test_one_of_two_equal_sums_a_tenth_too_large_is_caught(output, identity):
    findings = sharp_identities(scaled(run(PROBLEM), output, 1.1))
    assert broken(findings) == [identity]
    assert "by more than roundings explain" in findings[0].claim


@pytest.mark.parametrize(
    ("name", "times"), [("dk", "k"), ("dq", "q"), ("dv", "v"), ("out", "dout")]
)
def test_each_term_may_err_by_its_own_bound(name, times):
    trial = run(PROBLEM)
    factors = getattr(trial.inputs, times).double().sign()
    bound, wanted = (getattr(x, name) for x in (trial.judgement.bound, trial.want))
    # All others are right, and held to hardly anything.
    bounds = trial.judgement.bound._make(2.0**-40 * x for x in trial.judgement.bound)
    judgement = replace(trial.judgement, bound=bounds._replace(**{name: bound}))
    for share in (0.9, 1.1):
        got = trial.want._replace(**{name: wanted + share * bound * factors})
        found = broken(identities(replace(trial, got=got, judgement=judgement)))
        dots = [
            identity for identity in found if f"{times}.{name}" in identity or "out." in identity
        ]
        assert bool(dots) == (share > 1)


@pytest.mark.parametrize("keys", [1, 7, 8])
def test_heads_of_few_keys_are_left_alone(keys):
    mask = Mask(seqlens_q=(96, 90), seqlens_k=(keys, 128))
    trial = run(replace(PROBLEM, B=2, dtype="fp16", mask=mask))
    assert sharp_identities(trial) == []
    trial.got.dk[0, 0, 0] += 1.0
    assert ("sum_n dk = 0" in broken(sharp_identities(trial))) == (keys >= FEWEST)


def test_the_sums_taken_here_may_round():
    trial = run(replace(PROBLEM, dtype="fp64"))
    terms = stream.normal(0, "terms", (1, 2, 64, 32)) * 10.0 ** torch.arange(64).view(64, 1).sub(32)
    dk = torch.cat([terms, -terms[:, :, torch.arange(64) * 5 % 64]], 2)
    assert dk.sum(2).any()
    zeros = trial.judgement.bound._replace(dk=torch.zeros_like(dk))
    trial = replace(
        trial,
        got=trial.got._replace(dk=dk),
        judgement=replace(trial.judgement, bound=zeros),
    )
    assert "sum_n dk = 0" not in broken(identities(trial))


@pytest.mark.parametrize("dirty", ["nan", "inf", "max"])
def test_what_stands_in_padding_is_not_summed(dirty):
    problem = replace(PROBLEM, mask=PADDED)
    trial = run(problem)
    dirtied = replace(trial, inputs=make(problem, dirty=dirty))
    assert torch.isfinite(trial.inputs.q).all()
    assert identities(dirtied) + sharp_identities(dirtied) == []


@pytest.mark.parametrize("output", ["out", "dq", "dk", "dv"])
def test_nan_breaks_the_identities_of_its_output(output):
    trial = run(replace(PROBLEM, mask=PADDED))
    getattr(trial.got, output)[0, 1, 80, 0] = math.nan
    assert broken(identities(trial)) != []
    assert broken(sharp_identities(trial)) == broken(identities(trial))


def test_sharp_identities_leave_problems_outside_the_model_alone():
    trial = scaled(run(replace(PROBLEM, inputs="outliers")), "dk", 1.1)
    assert sharp_identities(trial) == []
    assert sharp_identities(scaled(run(PROBLEM), "dk", 1.1)) != []


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_empty_problems_hold_exactly(sizes):
    trial = run(replace(PROBLEM, M=20, N=20))
    empty = replace(PROBLEM, **sizes)
    B, M, N = empty.B, empty.M, empty.N
    outputs = trial.got._replace(
        out=torch.zeros(B, 4, M, 24),
        lse=torch.full((B, 4, M), -math.inf),
        dq=torch.zeros(B, 4, M, 32),
        dk=torch.zeros(B, 2, N, 32),
        dv=torch.zeros(B, 2, N, 24),
    )
    judgement = replace(trial.judgement, bound=outputs._replace(lse=torch.zeros(B, 4, M)))
    trial = replace(
        trial,
        problem=empty, inputs=make(empty), got=outputs, want=outputs, judgement=judgement,
    )  # fmt: skip
    assert identities(trial) + sharp_identities(trial) == []


def test_a_finding_says_where_and_by_how_much():
    trial = run(PROBLEM)
    trial.got.dk[0, 1, :, 5] += 3.0
    (finding, *_) = identities(trial)
    message = str(finding)
    assert "identities: dk of emulated breaks sum_n dk = 0 by more than the bounds" in message
    assert "worst at b=0 h=1 d=5: got 38" in message
    assert "want 0.0" in message
