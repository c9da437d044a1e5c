"""What killed each fault on record the last time, to be asked first: it saves time alone.

A fault is killed by a few of a hundred steps, and those of a rare feature come late. Where the file
is wrong, or says nothing of a fault, the steps are asked in their order, as they are afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fa_verify.diagnosis.outcomes import Outcome
from tests.mutation.trials import Step

__all__ = ["FILE", "UNIT_TESTS", "asked_first", "remember"]

FILE = Path(__file__).with_suffix(".json")
# In place of a step.
UNIT_TESTS = "unit tests"


def asked_first(file: Path = FILE) -> dict[str, str]:
    """By the name of a fault, the problem of a step as JSON, or UNIT_TESTS."""
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
