"""A mutant as a value: small edits of source text, each of which has to match exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Edit", "Mutant", "StaleError", "mutated"]


class StaleError(ValueError):
    """The source has changed under a mutant, so that it would test nothing."""


@dataclass(frozen=True)
class Edit:
    """Replaces a piece of a file.

    Args:
        file: Path from the root of the repository, "fa_kernels/kernels/dq.py".
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
    """

    name: str
    edits: tuple[Edit, ...]
    origin: str = ""
    caught_by: tuple[str, ...] = ()
    hidden: str = ""
    equivalent: str = ""


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
