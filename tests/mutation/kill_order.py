"""The step that killed each fault on record the last time; it runs first, which only saves time.

A few of a hundred steps kill a fault, and those of a rare feature come late. Where the file is
wrong, or lacks a fault, the steps run in their order, as the others do afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fa_verify.diagnosis.outcomes import Outcome
from tests.mutation.trials import Step

__all__ = ["FILE", "UNIT_TESTS", "kill_order", "remember"]

FILE = Path(__file__).with_suffix(".json")
# The name that it had before.
OLD_FILE = FILE.with_name("asked_first.json")
# In place of a step.
UNIT_TESTS = "unit tests"


def kill_order(file: Path = FILE) -> dict[str, str]:
    """By the name of a fault, the problem of a step as JSON, or UNIT_TESTS."""
    if not file.exists():
        file = file.with_name(OLD_FILE.name)
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def remember(outcomes: Iterable[Outcome], steps: Sequence[Step], file: Path = FILE) -> None:
    """Writes down what killed faults, of the others nothing."""
    killers = {
        x.name: UNIT_TESTS if x.checks == (UNIT_TESTS,) else steps[x.step].problem.to_json()
        for x in outcomes
        if x.source == "faults" and x.end == "killed"
    }
    file.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
