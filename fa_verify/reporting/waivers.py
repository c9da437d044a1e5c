"""A pytest plugin for ``--fa-waive=FILE``: failures that are known, each with a reason.

A waived finding counts as none, so the search goes on and one known fault does not hide the next.
A test that fails without findings, such as a crash, is reported as an expected failure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fa_verify.oracles.guarantee import GUARANTEES
from fa_verify.properties.guarantees.compare import Finding, Violation

__all__ = ["Waiver", "Waivers", "named_in", "read"]


@dataclass(frozen=True)
class Waiver:
    """A line of a file of waivers.

    Args:
        guarantee: Name of a guarantee or its first word, as in "G3 empty rows" and "G3"; ``*``
            stands for any, and for failures without a guarantee.
        pattern: Text of one line of the failure, or of the test's id; ``*`` stands for any text.
        reason: Why the failure is known.
        line: Number of the line in the file.
    """

    guarantee: str
    pattern: str
    reason: str
    line: int

    def matches(self, guarantee: str, text: str) -> bool:
        """Return whether a failure of a guarantee, with the text of its message, is waived."""
        if self.guarantee != "*" and not f"{guarantee} ".startswith(f"{self.guarantee} "):
            return False
        parts = map(re.escape, self.pattern.split("*"))
        return re.search(".*".join(parts), text) is not None

    def __str__(self) -> str:
        return f"{self.guarantee}, {self.pattern}: {self.reason}"


def read(path: Path) -> list[Waiver]:
    """Read a file of lines "guarantee, pattern, reason"; empty lines and ``#`` lines are comments.

    Raises:
        ValueError: The file cannot be read, or a line lacks a part. The message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) < 3 or not all(parts):
            raise ValueError(
                f"{path}:{number} is {line.strip()!r}; needs 'guarantee, pattern, reason'"
            )
        found.append(Waiver(*parts, line=number))
    return found


def named_in(text: str) -> str:
    """Return the guarantee that a failure message names, as pytest prints it; empty if none."""
    found = re.search(r"^(?:E\s+)?([A-Za-z]+\d*)( [a-z ]+)?: ", text, re.MULTILINE)
    return f"{found[1]}{found[2] or ''}" if found and found[1] in GUARANTEES else ""


class Waivers:
    """Drops waived findings, and counts the failures of each waiver in a process and its workers.

    Attributes:
        waivers: The waivers of the file.
        counts: Number of failures that a waiver matched, by its line.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Read the file of --fa-waive. Call in ``pytest_configure``.

        Raises:
            pytest.UsageError: The file cannot be read, or a line of it is wrong.
        """
        self.config = config
        self.path = Path(config.getoption("--fa-waive"))
        try:
            self.waivers = read(self.path)
        except ValueError as error:
            raise pytest.UsageError(f"--fa-waive: {error}") from None
        self.counts: Counter[int] = Counter()
        # The first line of the first failure that a waiver matched, by the waiver's line.
        self.examples: dict[int, str] = {}

    def waived(self, finding: Finding, test: str) -> bool:
        """Return whether a finding of a test is waived, and count it."""
        return self._match(finding.guarantee, str(finding), test) is not None

    def _match(self, guarantee: str, text: str, test: str) -> Waiver | None:
        first = text.strip().partition("\n")[0]
        for waiver in self.waivers:
            if waiver.matches(guarantee, f"{test}\n{text}"):
                self.counts[waiver.line] += 1
                self.examples.setdefault(waiver.line, first)
                return waiver
        return None

    @property
    def total(self) -> tuple[int, int]:
        """The numbers of the findings that were waived, and of the waivers that matched one."""
        return sum(self.counts.values()), sum(count > 0 for count in self.counts.values())

    def records(self) -> list[dict[str, Any]]:
        """Return the waivers as plain values, with the number of failures that each matched."""
        return [
            {
                "guarantee": waiver.guarantee,
                "pattern": waiver.pattern,
                "reason": waiver.reason,
                "line": waiver.line,
                "matched": self.counts[waiver.line],
                "example": self.examples.get(waiver.line, ""),
            }
            for waiver in self.waivers
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Report a waived failure that has no findings as an expected failure."""
        report: Any = yield
        error = call.excinfo.value if call.excinfo else None
        if report.failed and not isinstance(error, Violation):
            self._expect(report, item.nodeid)
        return report

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Report a waived crash as an expected failure, in the controller."""
        self._expect(report, crashitem)

    def _expect(self, report: Any, test: str) -> None:
        text = str(report.longrepr)
        waiver = self._match(named_in(text), text, test)
        if waiver is not None:
            report.outcome, report.wasxfail = "skipped", waiver.reason

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Send a worker's counts to the controller."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["waived"] = [dict(self.counts), self.examples]
        yield

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Add a worker's counts in the controller."""
        counts, examples = getattr(node, "workeroutput", {}).get("waived", ({}, {}))
        self.counts.update(counts)
        self.examples = {**examples, **self.examples}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the waivers that matched, with their reasons, and those that matched nothing."""
        terminalreporter.section("waived failures")
        for waiver in self.waivers:
            count = self.counts[waiver.line]
            if count:
                terminalreporter.write_line(f"{count} x {waiver}")
                terminalreporter.write_line(f"  {self.examples[waiver.line]}")
        for waiver in self.waivers:
            if not self.counts[waiver.line]:
                terminalreporter.write_line(
                    f"{self.path}:{waiver.line} matched nothing in this run: {waiver}", yellow=True
                )
