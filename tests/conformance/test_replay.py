"""Problems that once failed, and the problem of --replay: every guarantee on each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from oracles.problem import Problem
from properties.guarantees import COMPANIONS, GUARANTEES

REGRESSIONS = sorted((Path(__file__).parents[1] / "regressions").glob("*.json"))


def every_guarantee(trial):
    """Findings of all guarantees, and of their companions."""
    findings, unchecked = [], []
    for name, check in {**GUARANTEES, **COMPANIONS}.items():
        try:
            findings += check(trial)
        except (MemoryError, NotImplementedError) as error:
            unchecked.append(f"{name} was not checked: {error}")
    if unchecked and not findings:
        raise NotImplementedError("; ".join(unchecked))
    return findings


def check(check_one, subject, problem, device):
    __tracebackhide__ = True
    config = problem.config if problem.config in subject.configs else next(iter(subject.configs))
    check_one(dataclasses.replace(problem, device=device, config=config), every_guarantee)


def test_replay(check_one, subject, device, replayed):
    if replayed is None:
        pytest.skip("no --replay given")
    check(check_one, subject, replayed, device)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(check_one, subject, device, replayed, path):
    if replayed is not None:
        pytest.skip("--replay runs its problem alone")
    record = json.loads(path.read_text())
    check(check_one, subject, Problem.from_record(record["problem"]), device)
