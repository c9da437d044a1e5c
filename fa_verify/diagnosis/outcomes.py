"""What became of a mutant, as a value that reports are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fa_verify.diagnosis.forks import Ended
from fa_verify.diagnosis.mutant import Mutant

__all__ = ["ENDS", "Outcome", "outcome", "read", "write"]

# How a mutant can end, best first: a check said what is wrong; it raised, crashed or hung by
# itself; nothing noticed.
ENDS = ("killed", "raised", "crashed", "timed out", "survived")
# Sources as files call them that were written before.
_RENAMED = {"referee": "harness", "blind": "independent"}


@dataclass(frozen=True)
class Outcome:
    """One mutant's end.

    Args:
        source: Which list it is of.
        name: Its own.
        file: What it changes.
        end: Out of ``ENDS``.
        checks: That failed, the first first; only one unless all were asked for.
        step: The number of the problem that decided, -1 where none did.
        detail: Of the first failure.
        seconds: Until it.
        equivalent: The reason why it may survive, empty where it must not.
        missed: What is known of a fault that is not found.
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
        """Whether it survived, and nothing says why."""
        return self.end == "survived" and not (self.equivalent or self.missed)

    @property
    def refuted(self) -> bool:
        """Whether a reason says that nothing notices it, and something does."""
        return self.end != "survived" and bool(self.equivalent)


def outcome(source: str, mutant: Mutant, ended: Ended, equivalent: str = "") -> Outcome:
    """The outcome of a mutant, judged in a fork."""
    kills = ended.value.kills if ended.how == "returned" else []
    checks = tuple(dict.fromkeys(kill.check for kill in kills))
    if ended.how != "returned":
        end = ended.how
    elif not kills:
        end = "survived"
    else:
        end = "raised" if checks == ("raised",) else "killed"
    return Outcome(
        source=source,
        name=mutant.name,
        file=mutant.edits[0].file,
        end=end,
        checks=checks,
        step=kills[0].step if kills else -1,
        detail=kills[0].detail if kills else "",
        seconds=ended.value.seconds if ended.how == "returned" else ended.seconds,
        equivalent=equivalent,
        missed=mutant.missed,
    )


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Writes outcomes, a line of JSON each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(x)) + "\n" for x in outcomes]
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Outcome]:
    """What ``write`` wrote."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        source = _RENAMED.get(record["source"], record["source"])
        found.append(Outcome(**{**record, "source": source, "checks": tuple(record["checks"])}))
    return found
