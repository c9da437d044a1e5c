"""Deals the tests of a run to xdist's workers, so that all workers end at about the same time."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

__all__ = ["Dealing"]

# Tests that a worker has before it: one that it runs, and one more, without which it runs none.
AHEAD = 2
# The same while tests take less than so many seconds: a worker waits for each that it is sent.
MANY_AHEAD, SHORT = 16, 0.1
SHARED = 'scope="module"'


class Dealing(LoadScheduling):
    """The next test goes to the worker that has almost none left.

    xdist itself sends a worker more and more tests while they are short. A worker that has
    hundreds of tests before it when it comes to long ones runs them alone at the end.

    Tests of a file with fixtures of module scope go to one worker: another worker would set the
    fixtures up again.

    Args:
        config: Pytest's.
        log: xdist's.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._shares: dict[str, bool] = {}

    def schedule(self) -> None:
        """Starts when all workers have collected; later, when a new one has."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = next(iter(self.node2collection.values()))
            self.pending[:] = range(len(self.collection))
        # One each, so that long ones at the start do not all go to one worker.
        for ahead in range(1, AHEAD + 1):
            for node in self.nodes:
                self._fill(node, ahead)

    def check_schedule(self, node: Any, duration: float = 0.0) -> None:
        """Sends a worker its next tests, or home."""
        self._fill(node, AHEAD if duration >= SHORT else MANY_AHEAD)

    def _fill(self, node: Any, ahead: int) -> None:
        if node.shutting_down or node not in self.node2collection:
            return
        while self.pending and len(self.node2pending[node]) < ahead:
            self._send_tests(node, self._together())
        if not self.pending:
            node.shutdown()

    def _together(self) -> int:
        """Returns how many of the next tests go to one worker."""
        tests = self.collection or []
        file = tests[self.pending[0]].partition("::")[0]
        if file not in self._shares:
            try:
                text = (self.config.rootpath / file).read_text(encoding="utf-8")
            except OSError:
                text = ""
            self._shares[file] = SHARED in text
        if not self._shares[file]:
            return 1
        return sum(1 for _ in takewhile(lambda i: tests[i].startswith(f"{file}::"), self.pending))
