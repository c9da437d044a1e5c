"""Runs unit tests in this process, on a mutant that is already imported."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutation.catalogue.mutant import Kill

__all__ = ["first_failure", "unit_test_file"]

_ROOT = Path(__file__).resolve().parents[3]
_OPTIONS = (
    *("-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-profile=gate"),
    # pytest rewrites assertions of every module of a distribution with an entry point pytest11, as
    # fa-verify has: it would import the modules from their files, and not the mutant.
    "--assert=plain",
)


class _FirstFailure:
    """A pytest plugin that keeps the first failure."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.kill: Kill | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.kill is None:
            self.kill = Kill("raised", self._step(report.nodeid), _last_lines(report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.kill is None:
            self.kill = Kill(report.nodeid, self._step(report.nodeid), _message(report))

    def _step(self, nodeid: str) -> int:
        return self.files.index(nodeid.partition("::")[0])


def unit_test_file(name: str) -> str:
    """The path of a unit test file, from the root of the repository, by a name like "test_mask".

    Raises:
        ValueError: No file has this name.
    """
    found = sorted((_ROOT / "tests" / "unit").rglob(f"{name}.py"))
    if not found:
        raise ValueError(f"no file {name}.py below tests/unit")
    return found[0].relative_to(_ROOT).as_posix()


def first_failure(files: Sequence[str]) -> Kill | None:
    """Runs test files in this process, up to the first failure.

    Args:
        files: Paths from the root of the repository, run in that order.

    Returns:
        The test that failed, or "raised" if collection failed, with the index of the file as
        ``step``. None if all tests pass.
    """
    os.chdir(_ROOT)
    plugin, said = _FirstFailure(files), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*_OPTIONS, *files], plugins=[plugin])
    if code == pytest.ExitCode.OK:
        return None
    # Without a test's report pytest itself failed, such as in the import of conftest.py.
    return plugin.kill or Kill("raised", -1, _last_lines(said.getvalue()))


def _message(report: pytest.TestReport) -> str:
    """The short message of a failed test."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return _last_lines(report.longreprtext) if crash is None else crash.message[:500]


def _last_lines(text: str) -> str:
    return text.strip()[-500:]
