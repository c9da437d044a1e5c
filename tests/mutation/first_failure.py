"""Runs of unit tests in this process, for what they say of a mutant that it has imported."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fa_verify.diagnosis.mutant import Kill

__all__ = ["first_failure", "unit_test_file"]

_ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = (
    *("-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-profile=gate"),
    # Plugins of what was imported before pytest could rewrite them.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class _FirstFailure:
    """A pytest plugin that keeps what failed first."""

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
    """Path from the root of the repository of the unit test file of a name, such as "test_mask".

    Raises:
        ValueError: There is none.
    """
    found = sorted((_ROOT / "tests" / "unit").rglob(f"{name}.py"))
    if not found:
        raise ValueError(f"no file {name}.py below tests/unit")
    return found[0].relative_to(_ROOT).as_posix()


def first_failure(files: Sequence[str]) -> Kill | None:
    """Runs files of tests in this process, up to the first failure.

    Args:
        files: Paths from the root of the repository, run in that order.

    Returns:
        The test that failed, or "raised" where tests could not be collected; ``step`` counts the
        files. None if all pass.
    """
    os.chdir(_ROOT)
    plugin, said = _FirstFailure(files), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*_OPTIONS, *files], plugins=[plugin])
    if code == pytest.ExitCode.OK:
        return None
    # Without a report of a test, pytest itself gave up: conftest.py could not be imported, say.
    return plugin.kill or Kill("raised", -1, _last_lines(said.getvalue()))


def _message(report: pytest.TestReport) -> str:
    """What a failed test says in short."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return _last_lines(report.longreprtext) if crash is None else crash.message[:500]


def _last_lines(text: str) -> str:
    return text.strip()[-500:]
