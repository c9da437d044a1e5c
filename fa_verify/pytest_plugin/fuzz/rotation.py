"""Deals tests to xdist's workers in random order, again and again, until the time is over."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from fa_verify.pytest_plugin.fuzz.clock import Clock
from fa_verify.pytest_plugin.regression_files import is_regression

__all__ = ["Rotation"]

# In the names of tests that draw batched problems.
BATCHED = "::test_batched_"
# xdist's workers run a test when they know which comes next.
AHEAD = 2


class Rotation(LoadScheduling):
    """First the regressions, once; then rounds of all other tests, each round in a new order.

    Args:
        config: Pytest's.
        log: xdist's.
        clock: Starts when all regressions have been dealt.
        seconds: How long the other tests are dealt from then on.
    """

    def __init__(self, config: pytest.Config, log: Any, clock: Clock, seconds: float) -> None:
        super().__init__(config, log)
        self.clock = clock
        self.seconds = seconds
        # Indices of the tests that come round, those left out since included.
        self.rotating: list[int] = []

    def schedule(self) -> None:
        """Starts when all workers have collected; later, when a new one has."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = next(iter(self.node2collection.values()))
            for index, test in enumerate(self.collection):
                (self.pending if is_regression(test) else self.rotating).append(index)
        # One each, so that long ones at the start do not all go to one worker.
        for ahead in range(1, AHEAD + 1):
            for node in self.nodes:
                self._fill(node, ahead)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Sends a worker its next test, or home."""
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
        """All tests in random order, and one that draws batched problems before each of the others.

        A problem in a batched problem costs a fraction of one alone, so they get half of the time.
        """
        tests = random.sample(self.rotating, len(self.rotating))
        batched = [index for index in tests if BATCHED in (self.collection or [])[index]]
        others = [index for index in tests if index not in batched]
        if not batched or not others:
            return tests
        return [index for pair in zip(cycle(batched), others) for index in pair]

    def leave_out(self, test: str) -> None:
        """Deals a test no more."""
        index = (self.collection or []).index(test)
        for dealt in (self.rotating, self.pending):
            if index in dealt:
                dealt.remove(index)

    def remove_node(self, node: Any) -> str | None:
        """Takes a worker's tests back; the name of the one it was at, where it died."""
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
        """Whether nothing more is dealt."""
        if not self.collection_is_completed or self.collection is None:
            return False
        return self.clock.over() or not (self.pending or self.rotating)
