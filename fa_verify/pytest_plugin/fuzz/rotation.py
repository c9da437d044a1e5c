"""An xdist scheduler that repeats the tests in random order until the time is over."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from fa_verify.pytest_plugin.fuzz.clock import Clock
from fa_verify.pytest_plugin.regression_files import is_regression

__all__ = ["Rotation"]

# Part of the names of tests that draw batched problems.
BATCHED = "batched_problems"
# Number of tests sent to a worker ahead: xdist's workers run a test once they have the next one.
AHEAD = 2


class Rotation(LoadScheduling):
    """Schedules the regressions once, then rounds of all other tests, each in a new random order.

    Args:
        config: The pytest configuration.
        log: xdist's log.
        clock: The deadline, which this class starts when all regressions have been sent.
        seconds: Duration of the rounds in seconds.
    """

    def __init__(self, config: pytest.Config, log: Any, clock: Clock, seconds: float) -> None:
        super().__init__(config, log)
        self.clock = clock
        self.seconds = seconds
        # Indices of the tests that take turns.
        self.rotating: list[int] = []

    def schedule(self) -> None:
        """Send the first tests once all workers have collected; again for a replacement worker."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = next(iter(self.node2collection.values()))
            for index, test in enumerate(self.collection):
                (self.pending if is_regression(test) else self.rotating).append(index)
        # One test per worker at a time, so that the long tests at the start spread over workers.
        for ahead in range(1, AHEAD + 1):
            for node in self.nodes:
                self._fill(node, ahead)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Send a worker its next test, or shut it down after the deadline."""
        self._fill(node, AHEAD)

    def _fill(self, node: Any, ahead: int) -> None:
        if node.shutting_down or node not in self.node2collection:
            return
        while len(self.node2pending[node]) < ahead and not self.tests_finished:
            if not self.pending:
                self.clock.start(self.seconds)
                self.pending.extend(self._round())
            self._send_tests(node, 1)
        if self.tests_finished:
            node.shutdown()

    def _round(self) -> list[int]:
        """Return all tests in random order, alternating batched problems with the others.

        Batched problems get half of the turns, as a problem in a batch costs a fraction of a
        problem alone.
        """
        tests = random.sample(self.rotating, len(self.rotating))
        batched = [index for index in tests if BATCHED in (self.collection or [])[index]]
        others = [index for index in tests if index not in batched]
        if not batched or not others:
            return tests
        return [index for pair in zip(cycle(batched), others) for index in pair]

    def leave_out(self, test: str) -> None:
        """Stop scheduling a test."""
        index = (self.collection or []).index(test)
        for dealt in (self.rotating, self.pending):
            if index in dealt:
                dealt.remove(index)

    def remove_node(self, node: Any) -> str | None:
        """Take back a worker's tests; return the test that it was running if it died."""
        pending = self.node2pending.pop(node)
        if not pending or self.collection is None:
            return None
        died, *left = pending
        self.pending[:0] = [index for index in left if is_regression(self.collection[index])]
        for other in self.nodes:
            self.check_schedule(other)
        return self.collection[died]

    @property
    def tests_finished(self) -> bool:
        """Whether no more tests are scheduled."""
        if not self.collection_is_completed or self.collection is None:
            return False
        return self.clock.over() or not (self.pending or self.rotating)
