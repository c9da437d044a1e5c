"""The content of a report as plain values, written to report.json and rendered as a page."""

from __future__ import annotations

import datetime
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.running.coverage import possible_cells
from fa_verify.properties.running.replay_line import replay_line
from fa_verify.properties.running.tally import EDGES, Tally
from fa_verify.session import device_of, is_ours, is_whole, subject_of

__all__ = ["VERSION", "record"]

VERSION = 3
# Number of characters kept of a failure's text: a subject's traceback can be of any length.
MOST_TEXT = 20_000


def record(
    config: pytest.Config,
    reports: Sequence[pytest.TestReport],
    tally: Tally,
    exit_code: int,
    started: float,
) -> dict[str, Any]:
    """Return the content of a report. Numbers that are not finite become None.

    Args:
        config: The pytest configuration.
        reports: The reports of all phases of all tests.
        tally: The tally of the run.
        exit_code: Exit code of the run.
        started: ``time.time()`` at the start of the run.
    """
    counted = _results(reports)
    gate = config.pluginmanager.get_plugin("gate")
    causes = config.pluginmanager.get_plugin("causes").explained()
    return {
        "version": VERSION,
        "subject": _subject(config),
        "header": _header(config),
        "command": shlex.join(["pytest", *map(str, config.invocation_params.args)]),
        "started": datetime.datetime.fromtimestamp(started).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
        "exit_code": exit_code,
        "results": dict(Counter(counted.values())),
        "causes": [cause.record(number) for number, cause in enumerate(causes, 1)],
        "checked": _checked(counted),
        "not_run": _not_run(reports),
        "problems": _problems(tally),
        "worst": _worst(config, tally),
        "limits": _limits(tally),
        "coverage": _coverage(config, tally),
        "distribution": {"edges": [*EDGES], "counts": tally.distribution()},
        "failures": [_failure(x) for x in reports if x.failed],
        "baseline": None
        if gate is None or not gate.verdict
        else {
            "file": str(gate.path),
            "verdict": gate.verdict,
            "changes": [vars(change) for change in gate.differences],
        },
    }


def _subject(config: pytest.Config) -> dict[str, str] | None:
    """Return the subject's name, declarations and source; None if it cannot be loaded."""
    try:
        subject = subject_of(config)
    except pytest.UsageError:
        return None
    return {"name": subject.name, "declares": subject.declared(), "source": subject.source}


def _header(config: pytest.Config) -> list[str]:
    """Return the header lines of the run."""
    said = config.hook.pytest_report_header(config=config, start_path=config.invocation_params.dir)
    lines = [line for x in said for line in ([x] if isinstance(x, str) else x)]
    return [x.removeprefix("attention: ") for x in lines if x.startswith("attention: ")]


def _results(reports: Sequence[pytest.TestReport]) -> dict[str, str]:
    """Map each test to "passed", "failed" or "not run", the worst of its phases."""
    found: dict[str, str] = {}
    for report in reports:
        if report.failed:
            found[report.nodeid] = "failed"
        elif report.skipped:
            found.setdefault(report.nodeid, "not run")
        elif report.when == "call":
            found.setdefault(report.nodeid, "passed")
    return found


def _checked(results: dict[str, str]) -> list[dict[str, Any]]:
    """Count the results of each conformance test by dtype."""
    found: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for nodeid, result in results.items():
        match = re.match(r"(?:.*/)?conformance/(\w+)\.py::(\w+)(?:\[(.*)\])?$", nodeid)
        if match:
            file, test, parameters = match.groups()
            words = re.split(r"-", parameters or "")
            dtype = "tf32" if "tf32" in words else next((x for x in words if x in DTYPES), "")
            if test == "test_claim":  # the words of a row follow the name of its check
                test = words[1]
            claim = test.removeprefix("test_").replace("_", " ")
            found.setdefault((file, claim), {}).setdefault(dtype, Counter())[result] += 1
    return [
        {"file": file, "claim": claim, "by_dtype": {k: dict(x) for k, x in by.items()}}
        for (file, claim), by in sorted(found.items())
    ]


def _not_run(reports: Sequence[pytest.TestReport]) -> list[dict[str, Any]]:
    """Count the tests that did not run by reason."""
    reasons: Counter[str] = Counter()
    for report in reports:
        if report.skipped:
            why = report.longrepr
            why = str(why[2]) if isinstance(why, tuple) else str(why)
            reasons[why.removeprefix("Skipped: ")[:MOST_TEXT]] += 1
    return [{"reason": reason, "tests": count} for reason, count in reasons.most_common()]


def _problems(tally: Tally) -> dict[str, Any]:
    return {
        "by_dtype": dict(Counter(label for label, _ in tally.problems.values())),
        "several_tiles": sum(several for _, several in tally.problems.values()),
        "out_of_range": len(tally.out_of_range),
        "unsupported": {reason: len(x) for reason, x in sorted(tally.unsupported.items())},
    }


def _coverage(config: pytest.Config, tally: Tally) -> dict[str, Any] | None:
    """Return the coverage; None unless the run selected all conformance tests."""
    if not is_whole(config):
        return None
    return tally.coverage(possible_cells(subject_of(config), device_of(config)))


def _worst(config: pytest.Config, tally: Tally) -> list[dict[str, Any]]:
    """Return the largest error/bound of each output and dtype, with its replay line."""
    source = "" if is_ours(config) else config.getoption("--fa-kernel")
    return [
        {
            "output": key.split()[0],
            "dtype": key.split()[1],
            "ratio": ratio if math.isfinite(ratio) else None,
            "replay": replay_line(problem, source),
        }
        for key, (ratio, problem) in sorted(tally.worst.items(), key=lambda x: -x[1][0])
    ]


def _limits(tally: Tally) -> str:
    """Return the share of elements that limits of independent roundings judge, in a sentence."""
    counts = tally.by_limits().values()
    total, limited = (sum(x[place] for x in counts) for place in (0, 1))
    if not total:
        return ""
    return (
        f"{total:,} elements were held to the bound, {limited:,} of them to limits of independent "
        f"roundings ({limited / total:.0%})."
    )


def _failure(report: pytest.TestReport) -> dict[str, Any]:
    return {
        "test": report.nodeid,
        "phase": report.when,
        "text": report.longreprtext[:MOST_TEXT],
        "findings": getattr(report, "findings", []),
    }
