"""Problems that once failed, and the problem of --replay: every guarantee on each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from oracles.problem import Problem
from properties.guarantees import GUARANTEES

REGRESSIONS = sorted((Path(__file__).parents[1] / "regressions").glob("*.json"))


def every_guarantee(trial):
    """Findings of all guarantees."""
    return [finding for check in GUARANTEES.values() for finding in check(trial)]


def test_replay(check_problem, device, replayed):
    if replayed is None:
        pytest.skip("no --replay given")
    check_problem(dataclasses.replace(replayed, device=device), every_guarantee)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(check_problem, device, replayed, path):
    if replayed is not None:
        pytest.skip("--replay runs its problem alone")
    record = json.loads(path.read_text())
    problem = Problem.from_record(record["problem"])
    check_problem(dataclasses.replace(problem, device=device), every_guarantee)
