"""The line of progress: its counts, and the time left from what other tests took."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from fa_verify.pytest_plugin.progress import Estimate, Progress, clock
from tests.unit.fa_verify.test_command import folder, run

__all__ = ["folder"]

TESTS = [*(f"a.py::test_long[{i}]" for i in range(4)), "a.py::test_quick", "a.py::test_other"]


def test_tests_are_expected_to_take_what_others_of_their_function_took():
    estimate = Estimate()
    estimate.collected(TESTS)
    estimate.collected(["of another worker"])
    assert estimate.seconds(1) is None
    estimate.ended("a.py::test_quick", 0.0)
    assert estimate.seconds(1) is None
    estimate.ended(TESTS[0], 10.0)
    estimate.ended("of another worker", 99.0)
    # Three of 10 s, and one like the mean of the functions.
    assert estimate.seconds(1) == 3 * 10.0 + 5.0
    assert estimate.seconds(2) == 17.5
    assert (len(estimate.left), estimate.total) == (4, 6)


def test_a_line_counts_tests_and_failures_once():
    progress = Progress(SimpleNamespace(option=SimpleNamespace(numprocesses=2)))
    assert progress.line() == "0:00: collecting tests"
    progress.estimate.collected(TESTS)
    for test, outcomes in ((TESTS[0], "psp"), (TESTS[1], "pfp")):
        for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=True):
            progress.pytest_runtest_logreport(
                SimpleNamespace(nodeid=test, when=when, duration=2.0, failed=outcome == "f")
            )
    # A worker that died reports its test without a teardown.
    progress.pytest_runtest_logreport(
        SimpleNamespace(nodeid=TESTS[2], when="???", duration=0.0, failed=True)
    )
    assert progress.line() == "0:00: 3 of 6 tests, 2 failed, about 0:06 left"
    for test in TESTS[3:]:
        progress.estimate.ended(test, 0.0)
    assert progress.line() == "0:00: 6 of 6 tests, 2 failed"


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0:00"), (65, "1:05"), (3600, "60:00")])
def test_times_are_minutes_and_seconds(seconds, shown):
    assert clock(seconds) == shown


def test_the_command_shows_no_letters_and_still_names_what_failed(folder):
    done = run(
        folder, "check", "my.py:broken",
        "--", "-n1", "-k", "every_element_lies", "--tb=no",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert not re.search(r"^[.sFx]+( |$)", done.stdout, re.MULTILINE)
    assert re.search(r"^FAILED .*every_element_lies", done.stdout, re.MULTILINE)
