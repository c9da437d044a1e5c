"""The order in which tests are dealt to workers.

Forms of masks, regressions and combinations come first, then a sample of the conformance tests,
the tests that take long, and all others. Conformance tests have an order without a pattern, the
same in every run.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from fa_verify.pytest_plugin.regression_files import FORMS, is_regression
from fa_verify.session import CONFORMANCE

__all__ = ["LONGEST", "full_name", "turn"]

# Tests that take long, to which a conftest.py can add its own. On a GPU, all rows of long sequences
# take up to 30 s, and caches and score modifications, whose kernels no other test compiles, up to
# 150 s. The others wait for half of a GPU's memory. In another order they end last, while most
# workers have no more tests. Samples of the rows of long sequences take seconds, and come among the
# others: begun together, they fill a GPU of 80 GB.
LONGEST = [
    "conformance/test_long.py::test_long_sequences",
    "conformance/test_range.py",
    "conformance/test_state.py",
    "conformance/test_caches.py",
    "conformance/test_score_mods.py",
    "conformance/test_claims.py::test_claim[G1-modified_scores",
    "conformance/test_claims.py::test_claim[dbias",
    "conformance/test_claims.py::test_claim[dsinks",
]
# Neighbours among these tests use the same kernels. In order of names, many workers would compile
# one at the same time.
SPREAD = "conformance/"
# Problems of a quick run stand in the order of their kills.
IN_ORDER = "conformance/test_quick.py"
# Each finds more faults than another test, in as many seconds.
COMBINATIONS = "conformance/test_combinations.py"
# One test of so many comes before those that take long. The time left follows from this sample.
SAMPLE = 12


def full_name(test: str, root: Path) -> str:
    """Return a test id with the folder of its file, which ids of the command fa-verify lack."""
    return f"{CONFORMANCE.name}/{test}" if root == CONFORMANCE else test


def turn(test: str) -> tuple[bool, bool, bool, int, int]:
    """Return the key that sorts tests, by their full names."""
    first = FORMS not in test, not is_regression(test), COMBINATIONS not in test
    if IN_ORDER in test or SPREAD not in test:
        return *first, _place(test), 2**32
    spread = zlib.crc32(test.encode())
    return *first, -1 if spread % SAMPLE == 0 else _place(test), spread


def _place(test: str) -> int:
    return next((n for n, path in enumerate(LONGEST) if path in test), len(LONGEST))
