"""A pytest plugin: problems that once failed, found as files, are the first that a run replays.

``plugin`` registers it: ``config.pluginmanager.register(RegressionFiles(config))``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

__all__ = ["FOLDER", "RegressionFiles", "is_regression"]

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "regressions"


def is_regression(test: str) -> bool:
    """Whether the id of a test is that of a regression file's."""
    return "::test_regression[" in test


class RegressionFiles:
    """The files of a run: those of --corpus, then those of the checkout.

    The first process lists them and tells its workers, whose tests have to be the same, also where
    a file has been added when a worker is replaced.

    Attributes:
        folder: Where the corpus is kept.
        paths: The files.
    """

    def __init__(self, config: pytest.Config) -> None:
        given = config.getoption("--corpus")
        self.folder = FOLDER if given is None else Path(given).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise pytest.UsageError(f"--corpus is {given!r}; needs a folder, and that is a file")
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        if worker:
            self.paths = [Path(path) for path in worker["regressions"]]
        else:
            folders = dict.fromkeys((self.folder, FOLDER))
            self.paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker."""
        node.workerinput["regressions"] = [str(path) for path in self.paths]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Regressions come first."""
        items.sort(key=lambda item: not is_regression(item.nodeid))
