"""A tally counts each judged problem once, keeps the worst, and adds up over processes."""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_right

import execnet
import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import EDGES, Tally
from tests.unit.properties.kernels.broken_subjects import Eager

GOOD = Problem(M=3, N=4, dtype="fp64")
SUBJECT = Subject.of(Eager(), "eager")


def judged(*of: tuple[Problem, dict[str, float]], subject: Subject = SUBJECT) -> Tally:
    """A tally of trials with these peaks."""
    tally = Tally()
    for problem, peaks in of:
        tally.judged(subject, problem, peaks)
    return tally


def other(**fields: object) -> Problem:
    return dataclasses.replace(GOOD, **fields)


def said(tally: Tally) -> str:
    return "\n".join(tally.lines())


@pytest.mark.parametrize("change", [{}, {"seed": 1}, {"dirty": "nan"}, {"N": 5}], ids=str)
def test_a_problem_counts_once(change):
    tally = judged((GOOD, {"out": 0.5}), (other(**change), {"out": 0.5}))
    assert len(tally.problems) == (2 if change else 1)


@pytest.mark.parametrize("peaks", [(0.25, 0.75), (0.75, 0.25)])
def test_the_worst_is_kept_with_its_problem(peaks):
    tally = judged(*((other(seed=i), {"out": peak}) for i, peak in enumerate(peaks)))
    worst = other(seed=peaks.index(0.75))
    assert tally.worst == {"out fp64": (0.75, worst.to_json())}
    assert f"worst out: {worst.to_json()}" in said(tally)


def test_the_worst_of_an_output_is_that_of_all_its_dtypes():
    small = other(dtype="fp32")
    tally = judged((GOOD, {"out": 0.25}), (small, {"out": 0.5}))
    assert f"worst out: {small.to_json()}" in said(tally)


@pytest.mark.parametrize(
    ("sizes", "several"),
    [((17, 17), 1), ((16, 17), 0), ((17, 16), 0), ((33, 1), 0)],
)
def test_several_tiles_both_ways_are_more_than_one_of_rows_and_of_keys(sizes, several):
    tally = judged((other(M=sizes[0], N=sizes[1]), {}))
    assert f", {several} of them spanning several tiles both ways" in said(tally)


@pytest.mark.parametrize("peak", [0.5, 9999.9994, 1e4, 1e200, math.inf])
def test_columns_stay_apart_however_large_a_ratio_is(peak):
    lines = said(judged((GOOD, {"out": peak}), (other(dtype="fp32"), {"out": peak}))).splitlines()
    row = next(line for line in lines if line.startswith("out "))
    assert len(row) == len(lines[0])
    assert [float(x) for x in row.split()[1:]] == 2 * [pytest.approx(peak, rel=1e-2)]


def test_tf32_is_a_column_of_its_own():
    subject = Eager()
    subject.dots = "tf32"
    tally = judged((other(dtype="fp32"), {"out": 0.5}), subject=Subject.of(subject, "eager"))
    assert list(tally.worst) == ["out tf32"]


def full(seed: int) -> Tally:
    """A tally with an entry of every kind, different for each seed."""
    tally = judged((other(seed=seed), {"out": 0.25 + seed / 8, "lse": 0.75 - seed / 8}))
    tally.rejected(other(seed=10 + seed))
    tally.refused(other(seed=20 + seed), "not today")
    tally.refused(other(seed=30 + seed), f"reason {seed}")
    return tally


def test_tallies_of_several_processes_add_up():
    total = full(0)
    total.add(json.loads(json.dumps(full(1).record())))
    assert len(total.problems) == 2
    assert len(total.out_of_range) == 2
    assert {why: len(which) for why, which in total.unsupported.items()} == {
        "not today": 2, "reason 0": 1, "reason 1": 1,
    }  # fmt: skip
    assert total.worst == {
        "out fp64": (0.375, other(seed=1).to_json()),
        "lse fp64": (0.75, GOOD.to_json()),
    }


def test_equal_records_of_two_processes_count_once():
    total = full(0)
    total.add(full(0).record())
    assert total.record() == full(0).record()


def test_a_worker_can_send_a_record():
    """xdist sends values of plain types alone: a named tuple ends the worker."""
    record = full(0).record()
    assert record["cells"]
    assert execnet.loads(execnet.dumps(record)) == record


def test_a_record_that_is_handed_over_counts_once():
    tally, total = full(0), Tally()
    for _ in range(2):
        total.add(json.loads(json.dumps(tally.hand_over())))
    assert total.record() == full(0).record()
    assert tally.record() == Tally().record()


def test_the_summary_counts_what_was_not_judged():
    tally = full(0)
    tally.refused(other(seed=40), "not today")
    assert "1 distinct problems judged" in said(tally)
    assert "1 drawn out of range; 3 unsupported (75 %)" in said(tally)
    assert "  unsupported, 2: not today\n  unsupported, 1: reason 0" in said(tally)


def test_elements_that_limits_judge_are_summed_by_family_of_inputs():
    tally = Tally()
    for problem, limited in ((GOOD, 3), (other(seed=1), 5), (other(inputs="times8"), 0)):
        tally.judged(SUBJECT, problem, {"out": 0.5}, limited)
    whole = GOOD.elements["out"]
    assert tally.by_limits() == {GOOD.inputs: (2 * whole, 8), "times8": (whole, 0)}
    share = (
        f"{3 * whole:,} elements held to the bound, 8 of them to limits of independent roundings"
    )
    assert f"{share}: {GOOD.inputs} {8 / (2 * whole):.0%}" in said(tally)


def test_the_distribution_counts_each_problem_in_the_bin_of_its_worst_error():
    total = judged((GOOD, {"out": 0.5}), (other(seed=1), {"out": 0.0}), (GOOD, {"out": 0.5}))
    total.add(judged((other(seed=2), {"out": math.inf, "dq": 1.0})).record())
    found = total.distribution()
    assert set(found) == {"out fp64", "dq fp64"}
    assert {i for i, count in enumerate(found["out fp64"]) if count == 1} == {
        0,
        bisect_right(EDGES, 0.5),
        len(EDGES),
    }
    assert sum(found["out fp64"]) == 3
    # A value equal to an edge belongs to the bin above it.
    place = found["dq fp64"].index(1)
    assert EDGES[place - 1] == 1.0
