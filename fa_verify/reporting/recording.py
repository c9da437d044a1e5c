"""A pytest plugin that writes the outcome of every test, with its findings, to a file.

The file holds one JSON object per line: first the subject, then the tests as they end, last the
totals. An interrupted run leaves a readable file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally

__all__ = ["Recording", "plain"]

# Raised when a field changes its meaning or goes away; new fields and kinds of records keep it.
VERSION = 1
ROOT = Path(__file__).parents[2]
# Number of lines kept of a failure message, such as an assertion with its diff.
MOST_LINES = 12
_FINDINGS, _SAID, _ASKS = "findings", "said", "asks"


def plain(text: str) -> str:
    """Return a message without the paths of this machine, cut to ``MOST_LINES`` lines."""
    installed = sorted({sys.prefix, sys.base_prefix}, key=len, reverse=True)
    searched = sorted(
        {entry for entry in sys.path if Path(entry).is_absolute()}, key=len, reverse=True
    )
    for folder in (ROOT, *installed, *searched):
        text = text.replace(f"{folder}/", "")
    lines = text.strip().splitlines()
    more = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"... ({more} more lines)"] if more > 0 else [])])


class Recording:
    """Writes the file of --fa-findings. In a worker, attaches the findings to the reports of tests.

    Args:
        config: The pytest configuration. Its option --fa-findings names the file, which is created
            or emptied.
        subject: The subject under test.
        tally: The tally of the run.

    Raises:
        pytest.UsageError: The file cannot be written.
    """

    def __init__(self, config: pytest.Config, subject: Subject, tally: Tally) -> None:
        self.config, self.subject, self.tally = config, subject, tally
        # The guarantee that a test asks for, by its id; from the report of its setup.
        self._asks: dict[str, str] = {}
        self.path = (
            None if hasattr(config, "workerinput") else Path(config.getoption("--fa-findings"))
        )
        if self.path is not None:
            try:
                self.path.write_text("", encoding="utf-8")
            except OSError as error:
                raise pytest.UsageError(f"--fa-findings: {error}") from None

    def pytest_sessionstart(self) -> None:
        """Write the record of the subject."""
        self._write(
            kind="subject",
            version=VERSION,
            name=self.subject.name,
            declares=self.subject.declarations(),
            declared=self.subject.declared(),
            profile=hypothesis.settings.get_current_profile_name(),
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Attach the findings or the message of a failure to its report."""
        report = yield
        marker = item.get_closest_marker("asks")
        if report.when == "setup" and marker is not None:
            report.user_properties.append((_ASKS, marker.args[0].key))
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Violation):
            found = [
                {
                    "guarantee": finding.guarantee,
                    "message": plain(str(finding)),
                    "problem": finding.problem.to_json(),
                }
                for finding in error.findings
            ]
            report.user_properties.append((_FINDINGS, found))
        elif report.failed:
            said = f"{type(error).__name__}: {error}"
            report.user_properties.append((_SAID, plain(said.removeprefix("Failed: "))))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the record of a test."""
        properties: dict[str, Any] = dict(report.user_properties)
        if _ASKS in properties:
            # A test whose worker dies has no other report.
            self._asks[report.nodeid] = properties[_ASKS]
        if report.when != "call" and report.passed:
            return
        said = properties.get(_SAID, "")
        if report.skipped and isinstance(report.longrepr, tuple):
            said = report.longrepr[2].removeprefix("Skipped: ")
        crashed = report.failed and not properties  # a report by xdist for a worker that died
        if crashed:
            said = plain(str(report.longrepr))
        self._write(
            kind="test",
            test=report.nodeid,
            asks=self._asks.get(report.nodeid),
            outcome="crashed" if crashed else report.outcome,
            seconds=round(report.duration, 2),
            said=said,
            findings=properties.get(_FINDINGS, []),
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records of the waivers and causes, and that of the totals."""
        waivers = self.config.pluginmanager.get_plugin("waivers")
        for waiver in [] if waivers is None else waivers.records():
            self._write(kind="waiver", **waiver)
        causes = self.config.pluginmanager.get_plugin("causes")
        explained = [] if causes is None or self.path is None else causes.explained()
        for number, cause in enumerate(explained, 1):
            record = cause.record(number)
            record.get("finding", {}).pop("heat", None)
            self._write(**{**record, "kind": "cause", "fault": record.get("kind", "")})
        record = self.tally.record()
        self._write(
            kind="end",
            exit=int(session.exitstatus),
            judged=len(record["problems"]),
            out_of_range=len(record["out_of_range"]),
            refusals={why: len(which) for why, which in record["unsupported"].items()},
            worst={
                key: round(ratio, 3)
                for key, (ratio, _) in record["worst"].items()
                if math.isfinite(ratio)  # JSON has no infinity; an infinite ratio is a finding
            },
        )

    def _write(self, **fields: object) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(fields)}\n")
