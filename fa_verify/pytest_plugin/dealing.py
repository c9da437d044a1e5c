"""An xdist scheduler with which all workers end at about the same time."""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from fa_verify.pytest_plugin.turns import full_name, turn

__all__ = ["Dealing"]

# Number of tests sent to a worker ahead: xdist's workers run a test once they have the next one.
AHEAD = 2
SHARED = 'scope="module"'
# The shard in the name of a test. Tests of a shard use the same kernels.
_SHARD = re.compile(r"\b(?:fp16|bf16|fp32|fp64)-[\w-]+-d\d+\b")
# All tests of this file use the same kernels, but for the dtype, which ends their names.
_CACHES = "conformance/test_caches.py"
# Tests that reserve much of a GPU's memory. Each waits until the one before it has ended.
_OF_MEMORY = re.compile("2_to_the_31|a_million_rows|far (pages|apart)")


class Dealing(LoadScheduling):
    """Sends the next test to the worker that has almost none left.

    xdist's own scheduler sends a worker more and more tests while they are short. If long tests are
    among hundreds of tests that one worker has received, it runs them alone at the end.

    Tests are dealt in the order of ``turns``. A worker gets the next test for which it need not
    wait, if there is one: no other worker may be compiling its kernels, or reserve memory as it
    does.

    Tests of a file with fixtures of module scope go to one worker, because another worker would set
    the fixtures up again.

    Args:
        config: The pytest configuration.
        log: xdist's log.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._shares: dict[str, bool] = {}

    def schedule(self) -> None:
        """Send the first tests once all workers have collected; again for a replacement worker."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = next(iter(self.node2collection.values()))
            tests = self.collection
            self.pending[:] = sorted(range(len(tests)), key=lambda i: turn(self._name(i)))
        # One test per worker at a time, so that the long tests at the start spread over workers.
        for ahead in range(1, AHEAD + 1):
            for node in self.nodes:
                self._fill(node, ahead)

    def check_schedule(self, node: Any, duration: float = 0.0) -> None:
        """Send a worker its next test, or shut it down if there is none."""
        self._fill(node, AHEAD)

    def _fill(self, node: Any, ahead: int) -> None:
        if node.shutting_down or node not in self.node2collection:
            return
        while self.pending and len(self.node2pending[node]) < ahead:
            self._bring_forward(node)
            self._send_tests(node, self._together())
        if not self.pending:
            node.shutdown()

    def _name(self, test: int) -> str:
        return full_name((self.collection or [])[test], self.config.rootpath)

    def _bring_forward(self, node: Any) -> None:
        """Put first the next test that need not wait for those of other workers."""
        held = {
            _apart(self._name(i))
            for other, of_other in self.node2pending.items()
            if other is not node
            for i in of_other
        } - {""}
        places = (n for n, i in enumerate(self.pending) if _apart(self._name(i)) not in held)
        self.pending.insert(0, self.pending.pop(next(places, 0)))

    def _together(self) -> int:
        """Return the number of next tests that go to one worker together."""
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


@cache
def _apart(test: str) -> str:
    """Return a name that tests have in common which should not run at once; "" for others.

    They use the same kernels, or reserve much of a GPU's memory.
    """
    if _OF_MEMORY.search(test):
        return "much memory"
    path, _, parameters = test.partition("[")
    if _CACHES in path:
        return f"{_CACHES} {parameters[-5:]}"
    found = _SHARD.search(parameters)
    return "" if found is None else found[0]
