"""A pytest plugin: ``--report=DIR`` writes what a run checked and found, as a page and as JSON.

``plugin`` registers it. Workers attach findings to the reports of their tests; the
controller writes when all is known, the comparison with a baseline included.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_verify.properties.comparison.compare import Finding, Violation
from fa_verify.properties.execution.tally import Tally
from fa_verify.pytest_plugin.report import content
from fa_verify.pytest_plugin.report.page import page

__all__ = ["RunReport", "add_options"]

# Of one process: failing tests of which a heat map travels to the report, one each.
MAPS = 4


def add_options(group: pytest.OptionGroup) -> None:
    """The option of the report."""
    group.addoption(
        "--report",
        metavar="DIR",
        help="write report.html, one self-contained page, and report.json to this folder",
    )


class RunReport:
    """Collects in the controller what tests say, and writes the report.

    Registered before what it reports on, so that its end of the session comes after theirs.
    """

    def __init__(self, config: pytest.Config, tally: Tally) -> None:
        """Is to be called in ``pytest_configure``.

        Raises:
            pytest.UsageError: The folder is a file, or cannot be made.
        """
        given = config.getoption("--report")
        self.config = config
        self.tally = tally
        self.folder = None if given is None else Path(given)
        self.started = time.time()
        self.reports: list[pytest.TestReport] = []
        self.said = ""
        self._maps = 0
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise pytest.UsageError(f"--report: {given}: {error.strerror}") from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Attaches the findings to the report of a test that fails with some."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if self.folder is not None and isinstance(error, Violation):
            report.findings = [_record(finding) for finding in error.findings]
            mapped = next((x for x in error.findings if x.heat is not None), None)
            if mapped is not None and self._maps < MAPS:
                self._maps += 1
                place = error.findings.index(mapped)
                report.findings[place]["heat"] = mapped.heat.record()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what the report is made of."""
        if self.folder is not None and not hasattr(self.config, "workerinput"):
            self.reports.append(report)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Writes, after everything else has come to its end."""
        yield
        if (
            self.folder is None
            or hasattr(self.config, "workerinput")
            or self.config.option.collectonly
        ):
            return
        record = content.record(
            self.config, self.reports, self.tally, int(session.exitstatus), self.started
        )
        text = json.dumps(record, indent=1, allow_nan=False)
        try:
            (self.folder / "report.json").write_text(text + "\n", encoding="utf-8")
            # What matplotlib warns of is no verdict on a kernel.
            with warnings.catch_warnings(action="ignore"):
                (self.folder / "report.html").write_text(page(record), encoding="utf-8")
        except OSError as error:
            self.said = f"report: not written: {error}"
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        else:
            self.said = f"report: {self.folder / 'report.html'}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says where it is."""
        if self.said:
            terminalreporter.write_line(self.said)


def _record(finding: Finding) -> dict[str, Any]:
    """A finding as plain values, which xdist can send."""
    return {
        "guarantee": finding.guarantee,
        "output": finding.output,
        "text": str(finding),
        "replay": finding.replay,
        "heat": None,
    }
