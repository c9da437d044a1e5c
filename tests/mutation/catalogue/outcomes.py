"""The outcome of a mutant, as a value for reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutation.catalogue.mutant import Mutant, Verdict

if TYPE_CHECKING:
    from fa_verify.forks import Ended

__all__ = ["ENDS", "HANGS", "Outcome", "outcome", "read", "write"]

# How a mutant can end, best first: a check fails; the mutant raises, crashes or hangs; the time is
# over before all checks ran; no check fails.
ENDS = ("killed", "raised", "crashed", "timed out", "cut off", "survived")
# The check of a mutant that hangs.
HANGS = "hangs"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant.

    Args:
        source: The list that the mutant belongs to.
        name: Name of the mutant.
        file: The first file that the mutant changes.
        end: One of ``ENDS``.
        checks: The checks that failed, in order; only the first unless all checks were run.
        step: Index of the problem on which the first check failed; -1 if none failed.
        detail: Message of the first failure, or why the mutant was cut off.
        seconds: Seconds until the first failure.
        equivalent: Why the mutant may survive; empty if it must not.
        missed: Why the suite does not detect the fault; empty if it must.
    """

    source: str
    name: str
    file: str
    end: str
    checks: tuple[str, ...]
    step: int
    detail: str
    seconds: float
    equivalent: str = ""
    missed: str = ""

    @property
    def unexplained(self) -> bool:
        """Whether the mutant survived without an explanation."""
        return self.end == "survived" and not (self.equivalent or self.missed)

    @property
    def noticed(self) -> bool:
        """Whether something showed the mutant: a check, an exception, a crash or a hang."""
        return self.end not in ("cut off", "survived")

    @property
    def refuted(self) -> bool:
        """Whether a named fault is said to be equivalent, but was noticed."""
        return self.noticed and bool(self.equivalent)


def outcome(source: str, mutant: Mutant, ended: Ended) -> Outcome:
    """Return the outcome of a mutant that was checked in a fork."""
    verdict = ended.value if ended.how == "returned" else Verdict()
    kills = verdict.kills
    checks = tuple(dict.fromkeys(kill.check for kill in kills))
    detail = kills[0].detail if kills else verdict.cut
    if ended.how == "timed out":
        # A mutant that uses CPU time is known to hang before. This one waited or had too few CPUs.
        end, detail = "cut off", f"killed after {ended.seconds:.0f} s"
    elif ended.how != "returned":
        end = ended.how
    elif not kills:
        end = "cut off" if verdict.cut else "survived"
    else:
        end = {("raised",): "raised", (HANGS,): "timed out"}.get(checks, "killed")
    return Outcome(
        source=source,
        name=mutant.name,
        file=mutant.edits[0].file,
        end=end,
        checks=checks,
        step=kills[0].step if kills else -1,
        detail=detail,
        seconds=verdict.seconds if ended.how == "returned" else ended.seconds,
        # The reason at a line explains survivors; other mutants of the line may be killed.
        equivalent="" if mutant.key and end != "survived" else mutant.equivalent,
        missed=mutant.missed,
    )


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write outcomes to a file, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(x)) + "\n" for x in outcomes]
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Outcome]:
    """Read the outcomes that ``write`` has written."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.append(Outcome(**{**record, "checks": tuple(record["checks"])}))
    return found
