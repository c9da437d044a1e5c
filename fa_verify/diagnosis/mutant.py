"""A mutant and its verdict as values; its edits of source text have to match exactly once each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Edit", "Kill", "Mutant", "StaleError", "Verdict", "faults_of", "mutated"]


class StaleError(ValueError):
    """The source has changed under a mutant, so that it would test nothing."""


@dataclass(frozen=True)
class Edit:
    """Replaces a piece of a file.

    Args:
        file: Path from the root of the repository, "fa_kernels/kernels/portable/dq.py".
        old: Text that occurs in it exactly once; may span lines.
        new: Text that takes its place.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A fault, written down.

    Args:
        name: Says what is wrong, in few words: "dq: no mask on the ragged tail of keys".
        edits: What makes it.
        origin: Where somebody shipped it, or which operator made it.
        caught_by: The guarantees and checks that should catch it ("G1", "G4", "T3", "ranges").
        hidden: Where no input shows it, a clause: "while a row spans one tile".
        equivalent: Why no input of the contract shows it at all; empty where one does.
        missed: Why the suite does not find it although there is something to find.
        key: Of one that an operator made: file, function, operator and the number of the proposal.
    """

    name: str
    edits: tuple[Edit, ...]
    origin: str = ""
    caught_by: tuple[str, ...] = ()
    hidden: str = ""
    equivalent: str = ""
    missed: str = ""
    key: str = ""


def faults_of(file: str, caught_by: str, *rows: tuple[str, ...]) -> tuple[Mutant, ...]:
    """Mutants of one file, of one edit each.

    Args:
        file: Path from the root of the repository; its stem stands before every name.
        caught_by: Names with blanks between them, for all rows that say nothing of their own.
        rows: (name, old text, new text), or (name, old text, new text, caught by).
    """
    stem = file.rpartition("/")[2].removesuffix(".py")
    return tuple(
        Mutant(f"{stem}: {name}", (Edit(file, old, new),), "", tuple((*own, caught_by)[0].split()))
        for name, old, new, *own in rows
    )


class Kill(NamedTuple):
    """What ended a mutant, or would have.

    Args:
        check: The check that failed: "G4", "addresses", a unit test; or "raised".
        step: Which of the steps.
        detail: The finding's first lines, or the exception.
    """

    check: str
    step: int
    detail: str


@dataclass
class Verdict:
    """What became of a mutant.

    Args:
        kills: In order; empty is a survivor. One, unless all were asked for.
        seconds: Until the first kill, loading included; all of them for a survivor.
    """

    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0


def mutated(sources: Mapping[str, str], mutant: Mutant) -> dict[str, str]:
    """The sources by path, with a mutant's edits.

    Raises:
        StaleError: An edit names no file of the sources, or matches not exactly once.
    """
    texts = dict(sources)
    for edit in mutant.edits:
        if edit.file not in texts:
            raise StaleError(f"mutant {mutant.name!r}: there is no {edit.file}")
        count = texts[edit.file].count(edit.old)
        if count != 1:
            raise StaleError(
                f"mutant {mutant.name!r}: its text occurs {count} times in {edit.file}; "
                f"needs exactly one\n{edit.old}"
            )
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts
