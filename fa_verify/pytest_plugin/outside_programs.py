"""A pytest plugin that skips tests whose external programs are not installed, and counts them."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter

import pytest

__all__ = ["NEEDS", "OutsidePrograms"]

# Marker to the program and the Python module (or None) that its tests need.
NEEDS: dict[str, tuple[str, str | None]] = {
    "redis": ("redis-server", "redis"),
    "chromium": ("chromium", None),
}


class OutsidePrograms:
    """Skips tests by their markers and counts them in the summary."""

    def __init__(self) -> None:
        self._missing = {marker: _missing(*needs) for marker, needs in NEEDS.items()}
        self._not_run: Counter[str] = Counter()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that cannot run here."""
        for marker, missing in self._missing.items():
            if missing and item.get_closest_marker(marker):
                pytest.skip(f"not run: needs {missing}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the skipped tests."""
        if report.skipped and isinstance(report.longrepr, tuple):
            _, _, reason = report.longrepr
            needs = reason.partition("not run: needs ")[2]
            if needs:
                self._not_run[needs] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line for each missing program."""
        for needs, count in sorted(self._not_run.items()):
            terminalreporter.write_line(f"not run: {count} tests that need {needs}", yellow=True)


def _missing(program: str, module: str | None) -> str:
    """Return which of a program and its Python module are not installed; empty if both are."""
    missing = []
    if shutil.which(program) is None:
        missing.append(f"the program {program}")
    if module is not None and importlib.util.find_spec(module) is None:
        missing.append(f"the package {module}")
    return " and ".join(missing)
