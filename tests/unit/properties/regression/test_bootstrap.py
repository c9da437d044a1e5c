"""The bootstrap interval of a mean of differences: its place and its error rate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fa_verify.properties.regression.bootstrap import mean_difference

FEW = 2000


def test_differences_that_are_all_equal_leave_no_doubt():
    assert mean_difference([0.25] * 7, 1e-4) == (0.25, 0.25, 0.25)
    assert mean_difference([0.0] * 7, 1e-4) == (0.0, 0.0, 0.0)


def test_a_shift_of_many_standard_errors_is_beyond_the_interval():
    noise = np.random.default_rng(0).normal(0.0, 0.05, 30)
    mean, low, high = mean_difference(noise + 0.1, 1e-4)
    assert 0 < low < mean < high
    mirrored = mean_difference(-noise - 0.1, 1e-4)
    assert mirrored.high < 0


def test_the_same_differences_give_the_same_interval():
    noise = np.random.default_rng(1).normal(size=12)
    assert mean_difference(noise, 0.01) == mean_difference(noise, 0.01)


@pytest.mark.parametrize("skewed", [False, True], ids=["normal", "skewed"])
def test_the_low_end_lies_above_the_truth_no_oftener_than_its_level(skewed):
    generator = np.random.default_rng(2)
    level, trials = 0.05, 400
    drawn = generator.normal(size=(trials, 30))
    if skewed:  # logarithms of ratios of squares, with a long left tail
        drawn = np.log(drawn**2 + 0.05)
        drawn -= np.log(generator.normal(size=1_000_000) ** 2 + 0.05).mean()
    missed = sum(mean_difference(x, level, resamples=FEW).low > 0 for x in drawn)
    expected = level * trials
    assert missed <= expected + 3 * math.sqrt(expected)
    assert missed > 0, "the level does not matter"


@pytest.mark.parametrize("wrong", [[], [1.0], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]])
def test_differences_that_have_no_interval_are_refused(wrong):
    with pytest.raises(ValueError, match="needs two or more finite numbers"):
        mean_difference(wrong, 0.01)


@pytest.mark.parametrize("level", [0.0, 0.5, -1.0])
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(ValueError, match=r"level is .*; needs to be in \(0, 0.5\)"):
        mean_difference([1.0, 2.0], level)
