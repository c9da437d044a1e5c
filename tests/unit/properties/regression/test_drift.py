"""Changes since a baseline: worse results raise an alarm, others are reported."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.regression.baseline import Baseline, Entry, Environment
from fa_verify.properties.regression.drift import (
    FEWEST,
    grouped,
    moved_coverage,
    moved_maxima,
    moved_rms,
)

MASKS = (Mask(), Mask(causal=True))
# The 48 problems have two dtypes, two masks and twelve seeds.
ENTRIES = tuple(
    Entry(
        Problem(M=9, N=9, dtype=dtype, mask=mask, seed=seed), "G1", dtype,
        {"out": (0.5, 0.1), "dq": (0.25, 0.05 + seed / 1000)},
    )
    for dtype in ("fp16", "bf16") for mask in MASKS for seed in range(12)
)  # fmt: skip
THEN = Baseline("f", Environment("here", "1", "2"), ENTRIES)
SAME = dict(enumerate(ENTRIES))


def scaled(factor, which=lambda entry: True, output="dq", noise=0.0):
    """Pairs, some of which have an RMS larger by a factor, with noise."""
    generator = np.random.default_rng(0)
    pairs = []
    for entry in ENTRIES:
        largest, rms = entry.errors[output]
        by = (factor if which(entry) else 1.0) * math.exp(noise * generator.normal())
        errors = {**entry.errors, output: (largest, rms * by)}
        pairs.append((entry, dataclasses.replace(entry, errors=errors)))
    return pairs


def told(changes):
    return [(change.text, change.alarm) for change in changes]


def test_nothing_moves_where_nothing_changed():
    pairs = [(entry, entry) for entry in ENTRIES]
    assert [*moved_rms(pairs), *moved_maxima(pairs), *moved_coverage(THEN, SAME, {})] == []


def test_a_larger_rms_is_an_alarm_of_its_output_in_every_group():
    assert told(moved_rms(scaled(1.05))) == [
        (f"dq {group}: +5.00 % [+5.00 %, +5.00 %] over 24 problems", True)
        for group in ("bf16", "causal", "fp16", "full")
    ]


def test_a_smaller_rms_is_told_and_is_no_alarm():
    found = told(moved_rms(scaled(0.9, output="out")))
    assert found[0] == ("out bf16: -10.00 % [-10.00 %, -10.00 %] over 24 problems", False)
    assert not any(alarm for _, alarm in found)


@pytest.mark.parametrize(
    ("group", "which"),
    [
        ("dq bf16", lambda x: x.arithmetic == "bf16"),
        ("dq causal", lambda x: x.problem.mask.causal),
    ],
)
def test_a_loss_in_a_single_dtype_or_mask_is_an_alarm(group, which):
    found = moved_rms(scaled(1.2, which, noise=0.02))
    assert group in [change.text.partition(":")[0] for change in found if change.alarm]


def test_noise_without_a_shift_is_no_alarm():
    assert [x for x in moved_rms(scaled(1.0, noise=0.05)) if x.alarm] == []


def test_a_single_problem_that_is_worse_is_no_alarm_of_the_mean():
    assert list(moved_rms(scaled(1.5, lambda entry: entry is ENTRIES[3]))) == []


def test_a_group_of_few_problems_is_not_compared():
    few = [(entry, entry) for entry in ENTRIES[: FEWEST - 1]]
    assert grouped(few) == {}
    assert set(grouped([(entry, entry) for entry in ENTRIES[:FEWEST]])) == {
        "out fp16", "out full", "dq fp16", "dq full"
    }  # fmt: skip


@pytest.mark.parametrize("now", [0.0, math.inf], ids=["exact", "infinite"])
def test_an_rms_without_a_logarithm_is_compared_all_the_same(now):
    changes = list(moved_rms(scaled(now)))
    assert changes
    assert all(change.alarm == (now > 0) for change in changes)


def with_largest(value):
    pairs = [(entry, entry) for entry in ENTRIES]
    # Among the problems in fp16, neither the first nor the last.
    entry = ENTRIES[5]
    errors = {**entry.errors, "out": (value, 0.1)}
    pairs[5] = entry, dataclasses.replace(entry, errors=errors)
    return pairs


def test_a_largest_error_that_moved_is_told_and_one_beyond_its_bound_is_an_alarm():
    assert told(moved_maxima(with_largest(0.75))) == [
        ("largest error/bound of out fp16: 0.500 -> 0.750", False)
    ]
    assert told(moved_maxima(with_largest(1.25))) == [
        ("largest error/bound of out fp16: 0.500 -> 1.250", True)
    ]


@pytest.mark.parametrize(
    ("kind", "name", "is_it"),
    [
        ("dtype", "bf16", lambda x: x.arithmetic == "bf16"),
        ("mask", "causal", lambda x: x.problem.mask.causal),
    ],
)
def test_a_kind_of_which_nothing_is_judged_has_vanished(kind, name, is_it):
    now = {i: entry for i, entry in SAME.items() if not is_it(entry)}
    reasons = {i: "refused" for i in SAME if i not in now}
    assert told(moved_coverage(THEN, now, reasons)) == [
        (f"{kind} {name} is no longer covered: none of its 24 problems was judged", True),
        ("24 problems were judged in the baseline, not now: refused", True),
    ]


def test_a_guarantee_whose_check_is_not_made_has_vanished():
    reasons = dict.fromkeys(SAME, "there is no guarantee 'G1'")
    assert told(moved_coverage(THEN, SAME, reasons)) == [
        ("guarantee G1 is no longer covered: none of its 48 problems was judged", True),
        ("48 problems were judged in the baseline, not now: there is no guarantee 'G1'", True),
    ]


def test_one_problem_that_is_not_judged_any_more_is_an_alarm():
    now = {i: entry for i, entry in SAME.items() if i}
    assert told(moved_coverage(THEN, now, {0: "out of range"})) == [
        ("1 problem was judged in the baseline, not now: out of range", True)
    ]


def test_an_output_that_is_no_longer_returned_is_an_alarm():
    without = {i: dataclasses.replace(x, errors={"out": x.errors["out"]}) for i, x in SAME.items()}
    assert told(moved_coverage(THEN, without, {})) == [
        ("dq is no longer returned for 48 problems", True)
    ]
