"""The step or unit tests that last killed each recorded fault. They run first, to save time.

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
# The check of a kill by unit tests; recorded in place of a step's problem where no file is known.
UNIT_TESTS = "unit tests"


def kill_order(file: Path = FILE) -> dict[str, str]:
    """The killer by the name of the fault.

    It is the problem of a step as JSON, the path of a file of unit tests, or UNIT_TESTS.
    """
    if not file.exists():
        file = file.with_name(OLD_FILE.name)
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def remember(outcomes: Iterable[Outcome], steps: Sequence[Step], file: Path = FILE) -> None:
    """Writes the steps and the unit tests that killed faults; survivors are left out."""
    killers = {
        x.name: _killer(x, steps) for x in outcomes if x.source == "faults" and x.end == "killed"
    }
    file.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _killer(outcome: Outcome, steps: Sequence[Step]) -> str:
    if outcome.checks != (UNIT_TESTS,):
        return steps[outcome.step].problem.to_json()
    # The detail begins with the test. It has none where the collection failed.
    file, _, test = outcome.detail.partition("::")
    return file if test and file.endswith(".py") else UNIT_TESTS
