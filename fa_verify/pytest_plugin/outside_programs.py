"""A pytest plugin: tests that need a program which is not installed are listed as not run."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter

import pytest

__all__ = ["NEEDS", "OutsidePrograms"]

# Marker -> the program and the module that its tests need, None where they need none.
NEEDS: dict[str, tuple[str, str | None]] = {
    "redis": ("redis-server", "redis"),
    "chromium": ("chromium", None),
}


class OutsidePrograms:
    """Skips tests by their markers, and counts them where everybody sees it."""

    def __init__(self) -> None:
        self._missing = {marker: _missing(*needs) for marker, needs in NEEDS.items()}
        self._not_run: Counter[str] = Counter()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skips a test that cannot run here."""
        for marker, missing in self._missing.items():
            if missing and item.get_closest_marker(marker):
                pytest.skip(f"not run: needs {missing}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts what was not run."""
        if report.skipped and isinstance(report.longrepr, tuple):
            _, _, reason = report.longrepr
            needs = reason.partition("not run: needs ")[2]
            if needs:
                self._not_run[needs] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line for each thing that is missing."""
        for needs, count in sorted(self._not_run.items()):
            terminalreporter.write_line(f"not run: {count} tests that need {needs}", yellow=True)


def _missing(program: str, module: str | None) -> str:
    """What is not installed, of a program and the module that talks to it."""
    missing = []
    if shutil.which(program) is None:
        missing.append(f"the program {program}")
    if module is not None and importlib.util.find_spec(module) is None:
        missing.append(f"the package {module}")
    return " and ".join(missing)
