"""A pytest plugin that prints how far a run is, and how long it will still take.

The time left is that of the tests that have not ended, shared by the workers. A test is expected to
take as long as the other tests of its function did on average.
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


class Estimate:
    """Estimates the time that tests will take from the time that others took."""

    def __init__(self) -> None:
        self.left: dict[str, None] = {}
        self.total = 0
        self._took: dict[str, list[float]] = defaultdict(list)

    def collected(self, tests: Sequence[str]) -> None:
        """Note the ids of all tests. Later calls, by other workers, change nothing."""
        if not self.total:
            self.left, self.total = dict.fromkeys(tests), len(tests)

    def ended(self, test: str, seconds: float) -> None:
        """Note that a test has ended, and what it took."""
        if test in self.left:
            del self.left[test]
            self._took[_function(test)].append(seconds)

    def seconds(self, workers: int) -> float | None:
        """Return the expected seconds to the end; None while only skipped tests have ended."""
        means = {name: sum(times) / len(times) for name, times in self._took.items()}
        if max(means.values(), default=0.0) < SKIPPED:
            return None
        other = sum(means.values()) / len(means)
        return sum(means.get(_function(test), other) for test in self.left) / workers


class Progress:
    """Prints a line of progress every few seconds, in place of a letter for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.estimate = Estimate()
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
        workers = getattr(self.config.option, "numprocesses", None) or 1
        left = self.estimate.seconds(workers)
        done = self.estimate.total - len(self.estimate.left)
        line = f"{clock(passed)}: {done} of {self.estimate.total} tests, {self.failed} failed"
        # The last tests may look for causes for longer than any test before took.
        return line if left is None or left < 1 else f"{line}, about {clock(left)} left"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the tests of a run without workers."""
        self.estimate.collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note the tests that a worker has collected."""
        self.estimate.collected(ids)

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
        if terminal is None:
            return
        while not self._done.wait(ON_A_TERMINAL if terminal.isatty else IN_A_LOG):
            terminal.ensure_newline()
            terminal.write_line(self.line())
            terminal.flush()


def clock(seconds: float) -> str:
    """Return minutes and seconds, as "1:05"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _function(test: str) -> str:
    """Return what tests of about the same duration share: a function, or a row of claims."""
    name, _, parameters = test.partition("[")
    return f"{name}[{'-'.join(parameters.split('-')[:2])}" if "test_claim" in name else name
