"""The judges that run first, to save time: those that killed a fault before, or its neighbours.

Few of the hundred steps kill a given mutant, and steps for rare features come late. A file keeps
the judge that last killed each fault on record. A mechanical mutant meets those first that killed
others of its function and file in this run. If none of these kills, all judges run in their usual
order, so the order changes no verdict.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fa_verify.forks import Ended
from tests.mutation.catalogue.mutant import Mutant
from tests.mutation.catalogue.outcomes import Outcome
from tests.mutation.judging.trials import Step

__all__ = ["FILE", "UNIT_TESTS", "History", "kill_order", "remember"]

FILE = Path(__file__).with_suffix(".json")
# The check of a kill by unit tests; recorded in place of a step's problem where no file is known.
UNIT_TESTS = "unit tests"
# Most judges of other functions of the file, the deadliest first.
_OF_THE_FILE = 4


def kill_order(file: Path = FILE) -> dict[str, str]:
    """The killer by the name of the fault.

    It is the problem of a step as JSON, the path of a file of unit tests, or UNIT_TESTS.
    """
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


class History:
    """The kills of a run so far.

    Args:
        of_faults: The judge that last killed each fault on record, by the fault's name.
    """

    def __init__(self, of_faults: Mapping[str, str]) -> None:
        self._of_faults = of_faults
        self._kills: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def first(self, source: str, mutant: Mutant) -> list[str]:
        """The judges to run first for a mutant, by name."""
        if source == "faults":
            return [x for x in [self._of_faults.get(mutant.name, "")] if x]
        function, file = _places(mutant)
        nearest = [name for name, _ in self._kills[function].most_common()]
        near = [name for name, _ in self._kills[file].most_common(_OF_THE_FILE)]
        return list(dict.fromkeys((*nearest, *near)))

    def add(self, source: str, mutant: Mutant, ended: Ended) -> None:
        """Counts the kill of a mechanical mutant, if it was killed."""
        if source == "mechanical" and ended.how == "returned" and ended.value.judge:
            for place in _places(mutant):
                self._kills[place][ended.value.judge] += 1


def _places(mutant: Mutant) -> tuple[str, str]:
    """A mutant's function and file. A fault without a key has no function."""
    return mutant.key.partition(" ")[0], mutant.edits[0].file


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
