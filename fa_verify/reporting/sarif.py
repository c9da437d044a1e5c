"""A pytest plugin for ``--fa-sarif=FILE``: write the findings as SARIF 2.1.0, for code scanning.

A result stands for all failures of one guarantee on one output. It holds the message of the
simplest of them, and its place is the definition of the kernel.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import fa_verify
from fa_verify.conformance_process import Status
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.atomic_write import write_atomically
from fa_verify.reporting.waivers import named_in
from fa_verify.session import subject_of

__all__ = ["Sarif", "document", "place_of"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# The rule of a failure without a guarantee: a crash, a hang, a test that could not judge enough.
FAILURE = "failure"


class Sarif:
    """Collects the findings of all tests in the controller, and writes the file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.path = Path(config.getoption("--fa-sarif"))
        self.failures: list[dict[str, str]] = []
        self.said = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Attach the findings of a failing test to its report."""
        report: Any = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Violation):
            report.sarif = [
                {
                    "guarantee": finding.guarantee,
                    "output": finding.output,
                    "message": str(finding),
                    "size": finding.problem.to_json(),
                }
                for finding in error.findings
            ]
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the failures, in the controller."""
        if not report.failed or hasattr(self.config, "workerinput"):
            return
        text = str(report.longrepr)
        other = {
            "guarantee": named_in(text) or FAILURE, "output": "", "size": "",
            "message": f"{report.nodeid.rpartition('::')[2]}\n{text}",
        }  # fmt: skip
        self.failures += getattr(report, "sarif", [other])

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Write the file after all other plugins have finished."""
        yield
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        found = document(subject_of(self.config), self.failures, int(session.exitstatus))
        try:
            write_atomically(self.path, f"{json.dumps(found, indent=1)}\n")
        except OSError as error:
            self.said = f"SARIF: not written: {error}"
            session.exitstatus = session.exitstatus or Status.SUITE

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print why the file is not written."""
        if self.said:
            terminalreporter.write_line(self.said)


def document(
    subject: Subject, failures: Iterable[Mapping[str, str]], exit_status: int
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        subject: The subject under test.
        failures: ``guarantee``, ``output``, ``message`` and ``size`` of each failure. The one with
            the shortest ``size``, the JSON of its problem, stands for its group.
        exit_status: Exit status of the run.
    """
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for failure in failures:
        groups.setdefault((failure["guarantee"], failure["output"]), []).append(failure)
    rules = [*dict.fromkeys(guarantee for guarantee, _ in groups)]
    try:
        version = fa_verify.__version__
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "fa-verify",
                        "version": version,
                        "rules": [{"id": _rule(x), "shortDescription": {"text": x}} for x in rules],
                    }
                },
                "invocations": [
                    {"executionSuccessful": exit_status in (0, 1, 4), "exitCode": exit_status}
                ],
                "results": [
                    _result(subject, rules.index(key[0]), *key, group)
                    for key, group in groups.items()
                ],
            }
        ],
    }


def _result(
    subject: Subject, index: int, guarantee: str, output: str, group: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    plainest = min(group, key=lambda failure: len(failure["size"]))
    message = plainest["message"]
    if len(group) > 1:
        message += f"\n{len(group)} failures of this kind"
    uri, line = place_of(subject)
    same = hashlib.sha256("\n".join((subject.name, guarantee, output)).encode()).hexdigest()
    return {
        "ruleId": _rule(guarantee),
        "ruleIndex": index,
        "level": "error",
        "message": {"text": message},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": uri},
                    "region": {"startLine": line},
                }
            }
        ],
        "partialFingerprints": {"kernelGuaranteeOutput/v1": same},
    }


def place_of(subject: Subject) -> tuple[str, int]:
    """Return where a kernel is defined: a URI, relative to this folder if it can be, and a line."""
    source, _, name = subject.source.rpartition(":")
    path = Path(source)
    if path.suffix != ".py":
        file = inspect.getsourcefile(inspect.unwrap(subject.call))
        path, name = Path(file or "."), getattr(subject.call, "__name__", "")
    path = path.resolve()
    here = Path.cwd().resolve()
    uri = quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
    return uri, _line_of(path, name.partition(".")[0])


def _line_of(path: Path, name: str) -> int:
    """Return the line of the definition or assignment of a name in a file; 1 without one."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return 1
    for node in tree.body:
        if getattr(node, "name", "") == name:
            return int(node.lineno)
        if isinstance(node, ast.Assign) and any(
            isinstance(x, ast.Name) and x.id == name for x in node.targets
        ):
            return int(node.lineno)
    return 1


def _rule(guarantee: str) -> str:
    return guarantee.replace(" ", "-")
