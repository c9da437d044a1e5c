"""Identities: a correct kernel's sums satisfy them, and small shared errors break them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.statistics import FEWEST
from fa_verify.properties.inputs.tensors import make
from tests.unit.properties.guarantees.test_statistics import random_problem, run, share_of_bound

PROBLEM = Problem(H=4, Hk=2, M=96, N=128, D=32, Dv=24, dtype="bf16", seed=1)
PADDED = Mask(causal=True, seqlens_q=(70,), seqlens_k=(100,))
# One of the few values of dout is 255/256 of a power of two. Its products round every 8-bit P down,
# so the sum of dv is off by more than seven standard deviations.
ONE_ROW = (
    Problem(H=2, Hk=2, M=95, N=119, D=64, Dv=64, dtype="bf16", mask=Mask(seqlens_q=(1,)), seed=1),
    Problem(N=83, dtype="bf16", sm_scale=0.0625),
)


def broken(findings: list[Finding]) -> list[str]:
    """The identities that findings name."""
    return [re.search(r"breaks (.*?)( by more|:)", finding.claim).group(1) for finding in findings]


@pytest.mark.parametrize("problem", ONE_ROW, ids=["padded", "alone"])
def test_roundings_that_all_go_one_way_are_no_fault_where_few_rows_see_a_key(problem):
    trial = run(problem)
    assert identities(trial) == []
    # All roundings do have the same sign in this problem.
    spread = trial.variances.sum_dv.sqrt()
    dout = torch.where(torch.arange(problem.M)[:, None] < 1, trial.inputs.dout.double(), 0.0)
    error = (trial.got.dv.double().sum(2) - dout.sum(2)).abs()
    assert float((error / spread).amax()) > 7


@pytest.mark.parametrize(
    ("fault", "identity"),
    [
        ("delta summed in 16 bits", "sum_n dk = 0"),
        ("outputs truncated", "sum_n dv = sum_m dout"),
        ("P and dS truncated", "sum_n dv = sum_m dout"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fault_within_the_bound_breaks_an_identity(fault, identity, dtype):
    trial = run(replace(PROBLEM, dtype=dtype, M=256, Dv=64), fault)
    assert share_of_bound(trial) < 1
    assert identity in broken(identities(trial))


@pytest.mark.parametrize(
    ("output", "identity"), [("dk", "sum_n dk = 0"), ("dv", "sum_n dv = sum_m dout")]
)
def test_one_sum_that_is_too_large_is_caught(output, identity):
    trial = run(PROBLEM)
    spread = float(getattr(trial.variances, f"sum_{output}")[0, 1, 3].sqrt())
    getattr(trial.got, output)[0, 1, 5, 3] += 16 * spread
    (finding,) = identities(trial)
    assert broken([finding]) == [identity]
    assert (finding.output, finding.where, finding.bad) == (output, "b=0 h=1 d=3", 1)
    assert "by more than roundings explain" in finding.claim


@pytest.mark.parametrize("output", ["dk", "dv"])
def test_sums_that_are_all_a_little_too_large_are_caught_together(output):
    trial = run(PROBLEM)
    spread = getattr(trial.variances, f"sum_{output}").sqrt()
    gradient = getattr(trial.got, output)
    gradient[:, :, 5] += (3 * spread).to(gradient.dtype)
    (finding,) = identities(trial)
    assert (finding.output, finding.where[:10]) == (output, "mean over ")
    assert "mean square" in finding.claim


@pytest.mark.parametrize("keys", [1, 7, 8])
def test_heads_of_few_keys_are_left_alone(keys):
    mask = Mask(seqlens_q=(96, 90), seqlens_k=(keys, 128))
    trial = run(replace(PROBLEM, B=2, dtype="fp16", mask=mask))
    assert identities(trial) == []
    trial.got.dk[0, 0, 0] += 1.0
    assert ("sum_n dk = 0" in broken(identities(trial))) == (keys >= FEWEST)


@pytest.mark.parametrize("dirty", ["nan", "inf", "max"])
def test_padding_is_not_summed(dirty):
    problem = replace(PROBLEM, mask=PADDED)
    trial = run(problem)
    dirtied = replace(trial, inputs=make(problem, dirty=dirty))
    assert torch.isfinite(trial.inputs.dout).all()
    assert identities(dirtied) == []


@pytest.mark.parametrize("output", ["dk", "dv"])
def test_nan_breaks_the_identity_of_its_output(output):
    trial = run(replace(PROBLEM, mask=PADDED))
    getattr(trial.got, output)[0, 1, 80, 0] = math.nan
    assert [(x.output, x.where) for x in identities(trial)] == [(output, "b=0 h=1 d=0")]


@pytest.mark.parametrize(
    ("sizes", "output"),
    [
        ({"N": 65, "D": 72, "Dv": 72, "dtype": "bf16", "seed": 1344517120}, "sum_dv"),
        ({"N": 32, "D": 136, "Dv": 136, "dtype": "fp16", "seed": 123626202}, "sum_dk"),
    ],
    ids=["dv", "dk"],
)
def test_a_sum_without_roundings_is_no_evidence(sizes, output):
    """One of the values of the single row's dout, or of its q, is 0."""
    trial = run(Problem(H=17, Hk=17, **sizes))
    assert 0.0 in getattr(trial.variances, output)
    assert identities(trial) == []


def test_problems_outside_the_model_are_left_alone():
    for inputs, flagged in (("outliers", False), ("normal", True)):
        trial = run(replace(PROBLEM, inputs=inputs))
        trial.got.dk[0, 0, 0] += 1e4
        assert bool(identities(trial)) == flagged


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_empty_problems_hold_exactly(sizes):
    assert identities(replace(run(PROBLEM), problem=replace(PROBLEM, **sizes))) == []


def test_a_finding_says_where_and_by_how_much():
    trial = run(PROBLEM)
    trial.got.dk[0, 1, :, 5] += 3.0
    (finding, *_) = identities(trial)
    message = str(finding)
    assert "identities: dk of emulated breaks sum_n dk = 0 by more than roundings" in message
    assert "worst at b=0 h=1 d=5: got 38" in message
    assert "want 0.0" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dout_may_have_any_layout(layout):
    of_dout = replace(PROBLEM, layouts=("bhsd", "bhsd", "bhsd", layout))
    assert identities(run(of_dout)) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_correct_kernel_is_not_flagged(seed):
    trial = run(random_problem(seed), block_n=(16, 32, 64)[seed % 3])
    assert [str(finding) for finding in identities(trial)] == []
