"""The line of progress: its counts, and the time left from what other tests took."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from fa_verify.pytest_plugin.progress import COSTS, OTHER_COST, Estimate, Progress, clock
from tests.unit.fa_verify.test_command import folder, run

__all__ = ["folder"]

TESTS = [*(f"a.py::test_long[{i}]" for i in range(4)), "b.py::test_quick", "c.py::test_other"]
FAST = [f"a.py::test_fast[{i}]" for i in range(8)]


def estimate_of(tests, workers=1):
    estimate = Estimate(workers)
    estimate.collected(tests)
    estimate.collected(["of another worker"])
    return estimate


def test_tests_are_expected_to_take_what_others_of_their_function_took():
    estimate = estimate_of([*FAST, *TESTS])
    assert estimate.seconds(0.0) is None
    # The first test of a process takes longer, and says nothing about the others.
    estimate.ended(FAST[0], 100.0)
    for test in FAST[1:6]:
        estimate.ended(test, 2.0)
    estimate.ended("of another worker", 99.0)
    # Two of their function, and six of which nothing is known but the costs. Every test ran.
    other = OTHER_COST * (5 * 2.0 + 1) / (5 * OTHER_COST + 1)
    fast = (5 * 2.0 + other) / 6
    assert estimate.seconds(0.0) == pytest.approx(2 * fast + 6 * other)
    estimate.ended(TESTS[0], 12.0)
    other = OTHER_COST * (5 * 2.0 + 12.0 + 1) / (6 * OTHER_COST + 1)
    fast, long = (5 * 2.0 + other) / 6, (12.0 + other) / 2
    assert estimate.seconds(0.0) == pytest.approx(2 * fast + 3 * long + 2 * other)
    assert (len(estimate.left), estimate.total) == (7, len(FAST) + len(TESTS))


def test_tests_of_a_file_are_expected_to_be_skipped_as_often_as_before():
    claims = [f"test_claims.py::test_claim[{i}]" for i in range(3)]
    merges = [f"test_merging.py::test_{i}" for i in range(20)]
    estimate = estimate_of([*claims, *merges])
    estimate.ended(claims[0], 9.0)
    estimate.ended(claims[1], 4.0)
    many = estimate.seconds(0.0)
    for test in merges[:9]:
        estimate.ended(test, 0.0)
    few = estimate.seconds(0.0)
    scale = (4.0 + 1) / (COSTS["test_claim["] + 1)
    claim = COSTS["test_claim["] * scale
    assert many == pytest.approx(claim + 20 * OTHER_COST * scale)
    share = (2 + 1) / (11 + 1)
    assert few == pytest.approx((2 + share) / 3 * claim + 11 * share / 10 * OTHER_COST * scale)


def test_a_test_that_runs_for_long_may_run_as_long_again():
    estimate = estimate_of(FAST, workers=2)
    for test in FAST[:-1]:
        estimate.ended(test, 1.0)
    left = 2 * estimate.seconds(100.0)
    assert 0.8 < left < 1.0
    estimate.started(FAST[-1], 100.0)
    # A test runs in one process.
    assert estimate.seconds(100.25) == pytest.approx(left - 0.25)
    assert estimate.seconds(130.0) == 30.0


def test_a_line_counts_tests_and_failures_once():
    progress = Progress(SimpleNamespace(option=SimpleNamespace(numprocesses=2)))
    assert progress.line() == "0:00: collecting tests"
    progress.estimate.collected(FAST + TESTS)
    for test in FAST:
        progress.estimate.ended(test, 2.0)
    for test, outcomes in ((TESTS[0], "psp"), (TESTS[1], "pfp")):
        progress.pytest_runtest_logstart(nodeid=test)
        for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=True):
            progress.pytest_runtest_logreport(
                SimpleNamespace(nodeid=test, when=when, duration=1.0, failed=outcome == "f")
            )
    # A worker that died reports its test without a teardown.
    progress.pytest_runtest_logreport(
        SimpleNamespace(nodeid=TESTS[2], when="???", duration=0.0, failed=True)
    )
    assert progress.line() == "0:00: 11 of 14 tests, 2 failed, about 0:02 left"
    for test in TESTS[3:]:
        progress.estimate.ended(test, 0.0)
    assert progress.line() == "0:00: 14 of 14 tests, 2 failed"


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0:00"), (65, "1:05"), (3600, "60:00")])
def test_times_are_minutes_and_seconds(seconds, shown):
    assert clock(seconds) == shown


def test_the_command_shows_no_letters_and_a_screen_without_a_name_for_each_failure(folder):
    done = run(folder, "check", "my.py:broken", "--", "-n1", "-k", "every_element_lies")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not re.search(r"^[.sFx]+( |$)", done.stdout, re.MULTILINE)
    assert not re.search(r"^FAILED ", done.stdout, re.MULTILINE)
    assert "FAILED  1 cause" in done.stdout
