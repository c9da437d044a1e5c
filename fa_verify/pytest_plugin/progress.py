"""A pytest plugin that prints how far a run is, and how long it will still take.

The time left is that of the tests that have not ended, shared by the workers. A test is expected to
take its cost, in the seconds that other tests took for theirs, if as many tests of its file run as
before. That counts like one more test of its function.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

__all__ = ["Estimate", "Progress", "clock"]

# Seconds between lines, on a terminal and in a log file.
ON_A_TERMINAL, IN_A_LOG = 3.0, 10.0
# A test that takes fewer seconds than this was skipped.
SKIPPED = 0.05
# The times of tests that run, relative to each other, by a part of their names.
COSTS = {
    "test_claim[": 2.0,
    "test_declared.py": 1.0,
    "test_memory.py": 1.5,
    "test_tiles.py": 2.0,
    "test_quick.py": 1.0,
    "test_regression": 3.0,
}
OTHER_COST = 0.2


class Estimate:
    """Estimates the time that tests will take from the time that others took.

    Args:
        workers: Number of processes that run tests.
    """

    def __init__(self, workers: int) -> None:
        self.left: dict[str, None] = {}
        self.total = 0
        self._workers = workers
        self._started: dict[str, float] = {}
        self._warm = 0
        # Seconds and costs of the tests that ran; a second for a cost of 1 before there are any.
        self._seconds = self._costs = 1.0
        # Whether each test ran, by file, and the seconds of tests by function.
        self._ran: dict[str, list[bool]] = defaultdict(list)
        self._took: dict[str, list[float]] = defaultdict(list)

    def collected(self, tests: Sequence[str]) -> None:
        """Note the ids of all tests. Later calls, by other workers, change nothing."""
        if not self.total:
            self.left, self.total = dict.fromkeys(tests), len(tests)

    def started(self, test: str, now: float) -> None:
        """Note that a test starts, and when."""
        self._started[test] = now

    def ended(self, test: str, seconds: float) -> None:
        """Note that a test has ended, and what it took."""
        self._started.pop(test, None)
        if test not in self.left:
            return
        del self.left[test]
        runs = seconds > SKIPPED
        self._ran[_file(test)].append(runs)
        if runs and self._warm < self._workers:
            # The first test of a process waits for imports and caches.
            self._warm += 1
            return
        if runs:
            self._seconds += seconds
            self._costs += _cost(test)
        self._took[_function(test)].append(seconds)

    def seconds(self, now: float) -> float | None:
        """Return the expected seconds to the end; None while no test has ended."""
        if not self._ran:
            return None
        of_all = [runs for of_file in self._ran.values() for runs in of_file]
        share = (sum(of_all) + 1) / (len(of_all) + 1)
        total = longest = 0.0
        for test in self.left:
            ran, took = self._ran.get(_file(test), ()), self._took.get(_function(test), ())
            runs = (sum(ran) + share) / (len(ran) + 1)
            expected = runs * _cost(test) * self._seconds / self._costs
            expected = (sum(took) + expected) / (len(took) + 1)
            if test in self._started:
                passed = now - self._started[test]
                # A test that takes longer than expected may last as long again.
                expected = expected - passed if passed < expected else passed
                longest = max(longest, expected)
            total += expected
        return max(total / self._workers, longest)


class Progress:
    """Prints a line of progress every few seconds, in place of a letter for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        workers = getattr(config.option, "numprocesses", None) or 1
        self.estimate = Estimate(workers)
        self.failed = 0
        self.started = time.monotonic()
        self._took: dict[str, float] = defaultdict(float)
        self._summarising = False
        self._done = threading.Event()

    def line(self) -> str:
        """Return the line of progress."""
        passed = time.monotonic() - self.started
        if not self.estimate.total:
            return f"{clock(passed)}: collecting tests"
        left = self.estimate.seconds(time.monotonic())
        done = self.estimate.total - len(self.estimate.left)
        line = f"{clock(passed)}: {done} of {self.estimate.total} tests, {self.failed} failed"
        return line if left is None or left < 1 else f"{line}, about {clock(left)} left"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the tests of a run without workers."""
        self.estimate.collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note the tests that a worker has collected."""
        self.estimate.collected(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a test starts."""
        self.estimate.started(nodeid, time.monotonic())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test when it is torn down, or when its worker died."""
        self.failed += report.failed
        self._took[report.nodeid] += report.duration
        if report.when not in ("setup", "call"):
            self.estimate.ended(report.nodeid, self._took.pop(report.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Iterator[None]:
        """Print no letter for a test while the run goes on."""
        category, _, word = yield
        return category, "", word if self._summarising else ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """Print lines until the tests have ended."""
        thread = threading.Thread(target=self._print, name="progress", daemon=True)
        thread.start()
        try:
            return (yield)
        finally:
            self._done.set()
            thread.join()
            self._summarising = True

    def _print(self) -> None:
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self.config.option.fa_replay is not None:
            return
        causes = self.config.pluginmanager.get_plugin("causes")
        said = False
        while not self._done.wait(ON_A_TERMINAL if terminal.isatty else IN_A_LOG):
            terminal.ensure_newline()
            terminal.write_line(self.line())
            if not said and (first := causes.first()):
                said = True
                terminal.write_line(f"{clock(time.monotonic() - self.started)}: {first}")
            terminal.flush()


def clock(seconds: float) -> str:
    """Return minutes and seconds, as "1:05"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _cost(test: str) -> float:
    return next((cost for name, cost in COSTS.items() if name in test), OTHER_COST)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _function(test: str) -> str:
    """Return what tests of about the same duration share: a function, or a row of claims."""
    name, _, parameters = test.partition("[")
    return f"{name}[{'-'.join(parameters.split('-')[:2])}" if "test_claim" in name else name
