"""Measurements of a run: the largest error, and a mean in units of the predicted spread."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.adapters.sdpa import math as math_attention
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.guarantees.statistics import mean_squares
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.regression.measurement import measured
from fa_verify.properties.running.trial import run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

PROBLEM = Problem(M=20, N=24)


def trial_of(dtype: str, **declared: object):
    subject = Subject.of(math_attention if dtype == "bf16" else Eager(), "eager")
    return run_trial(
        dataclasses.replace(subject, **declared), dataclasses.replace(PROBLEM, dtype=dtype)
    )


def test_where_no_spread_is_predicted_the_unit_is_the_bound():
    trial = trial_of("fp32")
    ratio = ratios(trial.got.dq, trial.want.dq, trial.judgement.bound.dq)
    expected = (float(ratio.max()), math.sqrt(float(ratio.square().mean())))
    assert measured(trial)["dq"] == expected
    assert 0 < expected[1] < expected[0] < 1


def test_where_a_spread_is_predicted_it_is_the_unit_of_the_mean():
    trial = trial_of("bf16")
    found, squares = measured(trial), mean_squares(trial)
    assert set(squares) == {"out", "dq", "dk", "dv"}
    assert {name: found[name][1] ** 2 for name in squares} == pytest.approx(squares)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_nan_is_an_infinite_error(dtype):
    trial = trial_of(dtype)
    trial.got.dv[0, 0, 3, 5] = torch.nan
    assert measured(trial)["dv"] == (math.inf, math.inf)


def test_missing_and_empty_outputs_are_left_out():
    assert set(measured(trial_of("fp32", backward=False))) == {"out", "lse"}
    empty = run_trial(Subject.of(Eager(), "eager"), dataclasses.replace(PROBLEM, M=0))
    assert set(measured(empty)) == {"dk", "dv"}
