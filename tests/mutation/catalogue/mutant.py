"""Mutants as values: edits of source text, each of which must match exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Edit", "Kill", "Mutant", "StaleError", "Verdict", "faults_of", "mutated"]


class StaleError(ValueError):
    """The source has changed, so that a mutant's edits do not apply."""


@dataclass(frozen=True)
class Edit:
    """A replacement of text in a file.

    Args:
        file: Path from the root of the repository, "fa_kernels/kernels/portable/dq.py".
        old: Text that occurs in the file exactly once. It may span lines.
        new: Replacement.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A fault as edits of source text.

    Args:
        name: A short description of the fault: "dq: no mask on the ragged tail of keys".
        edits: The edits that introduce it.
        origin: Where the fault was shipped, or the operator that generated the mutant.
        caught_by: The guarantees and checks that should detect it ("G1", "G4", "T3", "ranges").
        hidden: The inputs on which the fault has no effect: "while a row spans one tile".
        equivalent: Why the fault has no effect on any valid input; empty if it has. For a
            generated mutant, why survivors of its line have none.
        missed: Why the suite does not detect the fault although it has an effect.
        key: For a generated mutant, its file, function, operator and the number of the proposal.
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
    """Return mutants of one file with one edit each.

    Args:
        file: Path from the root of the repository. Its stem is prepended to every name.
        caught_by: Default of the rows' last column: names separated by blanks.
        rows: (name, old text, new text), or (name, old text, new text, caught by).
    """
    stem = file.rpartition("/")[2].removesuffix(".py")
    return tuple(
        Mutant(f"{stem}: {name}", (Edit(file, old, new),), "", tuple((*own, caught_by)[0].split()))
        for name, old, new, *own in rows
    )


class Kill(NamedTuple):
    """A check that detected a mutant.

    Args:
        check: The check that failed: "G4", "addresses", a unit test; or "raised".
        step: Index of the step.
        detail: The first lines of the finding, or the exception.
    """

    check: str
    step: int
    detail: str


@dataclass
class Verdict:
    """The verdict on a mutant.

    Args:
        kills: The kills in order: none for a survivor; only the first unless all checks were run.
        seconds: Seconds until the first kill, including loading; for a survivor, of all checks. CPU
            time for a mutant of the kernels, and wall time for one of the harness.
        judge: Name of the judge that killed first; empty if none did.
        cut: Why checks were left out, if the time was over before a kill; empty if none were.
    """

    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    judge: str = ""
    cut: str = ""


def mutated(sources: Mapping[str, str], mutant: Mutant) -> dict[str, str]:
    """Apply a mutant's edits to sources, given as path to text.

    Raises:
        StaleError: An edit names a file that is not in ``sources``, or its text does not occur
            exactly once.
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
