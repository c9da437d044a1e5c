"""An xdist scheduler with which all workers end at about the same time."""

from __future__ import annotations

import re
import zlib
from functools import cache
from itertools import takewhile
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from fa_verify.pytest_plugin.regression_files import FORMS

__all__ = ["Dealing"]

# Number of tests sent to a worker ahead: xdist's workers run a test once they have the next one.
AHEAD = 2
SHARED = 'scope="module"'
# Tests that take long. The faults are one test of 250 s in the interpreter. On a GPU, all rows of
# long sequences take up to 30 s, and caches and score modifications, whose kernels no other test
# compiles, up to 150 s. The others start processes, or wait for half of a GPU's memory. They come
# before all but the forms of masks: in another order they end last, while most workers have no more
# tests. Samples of the rows of long sequences take seconds, and come among the others: begun
# together, they fill a GPU of 80 GB.
LONGEST = (
    "mutation/test_faults.py",
    "conformance/test_long.py::test_long_sequences",
    "conformance/test_range.py",
    "conformance/test_state.py",
    "conformance/test_caches.py",
    "conformance/test_score_mods.py",
    "conformance/test_claims.py::test_claim[G1-modified_scores",
    "conformance/test_claims.py::test_claim[dbias",
    "conformance/test_claims.py::test_claim[dsinks",
    "unit/fa_verify/",
    "unit/repository/test_docs.py",
    "unit/repository/test_installation.py",
    "unit/fa_kernels/",
)
# Neighbours among these tests use the same kernels. In order of names, many workers would compile
# one at the same time.
SPREAD = "conformance/"
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

    Conformance tests are dealt in an order without a pattern, the same in every run. A worker gets
    the next test for which it need not wait, if there is one: no other worker may be compiling its
    kernels, or reserve memory as it does.

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
            self.pending[:] = sorted(
                range(len(tests)),
                key=lambda i: (FORMS not in tests[i], *_turn(tests[i])),
            )
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

    def _bring_forward(self, node: Any) -> None:
        """Put first the next test that need not wait for those of other workers."""
        tests = self.collection or []
        held = {
            _apart(tests[i])
            for other, of_other in self.node2pending.items()
            if other is not node
            for i in of_other
        } - {""}
        places = (n for n, i in enumerate(self.pending) if _apart(tests[i]) not in held)
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


def _turn(test: str) -> tuple[int, int]:
    """Return the place of a test in ``LONGEST``, and one that spreads similar tests."""
    place = next((n for n, path in enumerate(LONGEST) if path in test), len(LONGEST))
    if SPREAD not in test:
        return place, 2**32
    return place, zlib.crc32(test.encode())
