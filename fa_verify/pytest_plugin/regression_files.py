"""A pytest plugin that replays problems that once failed, before the tests of drawn problems.

``fa_verify.pytest_plugin.running`` registers it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fa_verify.session import CONFORMANCE, in_checkout

__all__ = ["FOLDER", "FORMS", "RegressionFiles", "is_regression"]

FOLDER = CONFORMANCE.parent / "regressions"
# The default of --fa-corpus outside of a checkout.
ELSEWHERE = "fa-verify-problems"

# The test of a mask alone, before kernels that evaluate it.
FORMS = "::test_the_forms_of_a_mask_agree["


def is_regression(test: str) -> bool:
    """Return whether a test id belongs to a regression file."""
    return "::test_regression[" in test


class RegressionFiles:
    """The regression files of a run: the folder of --fa-corpus, then tests/regressions.

    The controller lists the files once and sends the list to its workers, so that all workers
    collect the same tests even if a file is added during the run.

    Attributes:
        folder: The folder of the corpus.
        paths: The regression files.
    """

    def __init__(self, config: pytest.Config) -> None:
        given = config.getoption("--fa-corpus")
        if given is None and not in_checkout(config):
            given = ELSEWHERE
        self.folder = FOLDER if given is None else Path(given).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise pytest.UsageError(f"--fa-corpus is {given!r}, a file; needs a folder")
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        if worker:
            self.paths = [Path(path) for path in worker["regressions"]]
        else:
            folders = dict.fromkeys((self.folder, FOLDER))
            self.paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the list of files to a worker."""
        node.workerinput["regressions"] = [str(path) for path in self.paths]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move the forms of masks to the front, then the regressions."""
        items.sort(key=lambda item: (FORMS not in item.nodeid, not is_regression(item.nodeid)))
