"""A pytest plugin for ``--fa-report=DIR``: write the results of a run as a page and as JSON.

``fa_verify.pytest_plugin.running`` registers it. Workers attach findings to the reports of their
tests. The controller writes the files after the comparison with a baseline.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_verify.conformance_process import Status
from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.running.tally import Tally
from fa_verify.reporting.html import content
from fa_verify.reporting.html.page import page

__all__ = ["RunReport"]

# Number of failing tests per process that send a heat map to the report.
MAPS = 4


class RunReport:
    """Collects the reports of tests in the controller and writes the report of the run.

    Register it before the gate, so that its ``pytest_sessionfinish`` ends after the gate's.
    """

    def __init__(self, config: pytest.Config, tally: Tally) -> None:
        """Create the folder. Call in ``pytest_configure``.

        Raises:
            pytest.UsageError: The folder is a file or cannot be created.
        """
        given = config.getoption("--fa-report")
        self.config = config
        self.tally = tally
        self.folder = Path(given)
        self.started = time.time()
        self.reports: list[pytest.TestReport] = []
        self.said = ""
        self._maps = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--fa-report: {given}: {error.strerror}") from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Attach the findings of a failing test to its report."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Violation):
            report.findings = [_record(finding) for finding in error.findings]
            mapped = next((x for x in error.findings if x.heat is not None), None)
            if mapped is not None and self._maps < MAPS:
                self._maps += 1
                place = error.findings.index(mapped)
                report.findings[place]["heat"] = mapped.heat.record()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports of all tests in the controller."""
        if not hasattr(self.config, "workerinput"):
            self.reports.append(report)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Write the report after all other plugins have finished."""
        yield
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        record = content.record(
            self.config, self.reports, self.tally, int(session.exitstatus), self.started
        )
        text = json.dumps(record, indent=1, allow_nan=False)
        try:
            (self.folder / "report.json").write_text(text + "\n", encoding="utf-8")
            # A warning of matplotlib must not fail the run.
            with warnings.catch_warnings(action="ignore"):
                (self.folder / "report.html").write_text(page(record), encoding="utf-8")
        except OSError as error:
            self.said = f"report: not written: {error}"
            session.exitstatus = session.exitstatus or Status.SUITE
        else:
            self.said = f"report: {self.folder / 'report.html'}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the path of the report."""
        if self.said:
            terminalreporter.write_line(self.said)


def _record(finding: Finding) -> dict[str, Any]:
    """Convert a finding to plain values, which xdist can serialise."""
    return {
        "guarantee": finding.guarantee,
        "output": finding.output,
        "text": str(finding),
        "replay": finding.replay,
        "heat": None,
    }
