"""The step that last killed each recorded fault. It runs first, which only saves time.

Few of the hundred steps kill a given fault, and steps for rare features come late. If the recorded
step does not kill the fault, or none is recorded, the steps run in their usual order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fa_verify.diagnosis.outcomes import Outcome
from tests.mutation.judging.trials import Step

__all__ = ["FILE", "UNIT_TESTS", "kill_order", "remember"]

FILE = Path(__file__).with_suffix(".json")
# The former name of the file.
OLD_FILE = FILE.with_name("asked_first.json")
# Recorded in place of a step's problem.
UNIT_TESTS = "unit tests"


def kill_order(file: Path = FILE) -> dict[str, str]:
    """The problem of the killing step as JSON, or UNIT_TESTS, by the name of the fault."""
    if not file.exists():
        file = file.with_name(OLD_FILE.name)
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def remember(outcomes: Iterable[Outcome], steps: Sequence[Step], file: Path = FILE) -> None:
    """Writes the steps that killed faults; survivors are left out."""
    killers = {
        x.name: UNIT_TESTS if x.checks == (UNIT_TESTS,) else steps[x.step].problem.to_json()
        for x in outcomes
        if x.source == "faults" and x.end == "killed"
    }
    file.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
