"""Problems that once failed, and the problem of --replay: every guarantee on each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from oracles.problem import Problem
from properties.compare import Violation
from properties.guarantees import GUARANTEES

REGRESSIONS = sorted((Path(__file__).parents[1] / "regressions").glob("*.json"))


def every_guarantee(trial):
    """Findings of all guarantees."""
    return [finding for check in GUARANTEES.values() for finding in check(trial)]


def check(findings_of, problem, device):
    __tracebackhide__ = True
    findings = findings_of(dataclasses.replace(problem, device=device), every_guarantee)
    if findings:
        raise Violation(findings)


def test_replay(findings_of, device, replayed):
    if replayed is None:
        pytest.skip("no --replay given")
    check(findings_of, replayed, device)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(findings_of, device, replayed, path):
    if replayed is not None:
        pytest.skip("--replay runs its problem alone")
    record = json.loads(path.read_text())
    check(findings_of, Problem.from_record(record["problem"]), device)
