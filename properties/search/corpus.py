"""Problems that a kernel failed on, kept as JSON files: one a cause, the smallest seen of it.

Nothing in a file is evaluated, executed or imported, and no file that a person wrote is changed.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_verify.oracles.masks.codec import UnknownMaskError
from fa_verify.oracles.problem import Problem
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.atomic_write import write_atomically
from fa_verify.properties.search.minimize import complexity

__all__ = ["Cause", "CorpusEntry", "NotReplayableError", "keep"]


class NotReplayableError(ValueError):
    """A file is as it should be, but this run lacks what its problem is made of."""


@dataclass(frozen=True)
class Cause:
    """What tells one fault from another, as far as its findings do.

    Args:
        guarantee: The first word of what is violated, such as "G1"; or "exception".
        output: The output that is wrong; the type of an exception.
        tile: The kind of tile that its worst element lies in, one of ``compare.TILES``; the file
            and line that raise an exception; empty where neither is known.
    """

    guarantee: str
    output: str
    tile: str

    @classmethod
    def of(cls, finding: Finding) -> Cause:
        """The cause that a finding speaks of."""
        if finding.raised:
            raised, _, place = finding.raised.rpartition("\n")
            where = re.search(r"([^/\\(]+), line (\d+)\)$", place)
            line = f"{where[1]}:{where[2]}" if where else ""
            return cls("exception", re.split(r"\W", raised or place)[0], line)
        # Scratch has no name, and its shape is the problem's.
        return cls(finding.guarantee.split()[0], finding.output.split(" of ")[0], finding.tile)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.guarantee, self.output, self.tile) if part)


@dataclass(frozen=True)
class CorpusEntry:
    """A problem that fails, and what was seen of it: the content of a regression file.

    Args:
        problem: The problem.
        subject: Name of the subject that failed.
        guarantee: What it violated, as a failure message says it.
        why: The cause in words.
        cause: What tells it from other entries; None in a file that a person wrote.
        message: The failure message.
        kernel: What --kernel was given, empty for the project's own kernels.
        versions: Of what was running, by name.
    """

    problem: Problem
    subject: str
    guarantee: str
    why: str
    cause: Cause | None = None
    message: str = ""
    kernel: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, finding: Finding, versions: Mapping[str, str]) -> CorpusEntry:
        """The entry that a finding makes."""
        message = str(finding)
        return cls(
            problem=finding.problem,
            subject=finding.subject,
            guarantee=finding.guarantee,
            why=_in_a_line(message),
            cause=Cause.of(finding),
            message=message,
            kernel=finding.kernel,
            versions=versions,
        )

    @property
    def name(self) -> str:
        """What its file is called, without a number and the suffix."""
        parts = [self.subject] + ([] if self.cause is None else [*vars(self.cause).values()])
        words = (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in parts)
        return "-".join(word for word in words if word)[:120]

    def to_json(self) -> str:
        """Indented JSON that ``read`` reads."""
        record: dict[str, Any] = {"subject": self.subject, "guarantee": self.guarantee}
        if self.cause is not None:
            record |= {"output": self.cause.output, "tile": self.cause.tile}
        record["why"] = self.why
        if self.message:
            record["message"] = self.message.splitlines()
        if self.kernel:
            record["kernel"] = self.kernel
        if self.versions:
            record["versions"] = dict(self.versions)
        record["problem"] = json.loads(self.problem.to_json())
        return json.dumps(record, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> CorpusEntry:
        """The entry in a file.

        Raises:
            NotReplayableError: Its mask is of a type that is not registered in this run.
            ValueError: It cannot be read, is no JSON object, or lacks a problem; the message names
                the file.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(record, dict) or "problem" not in record:
                raise ValueError(
                    'needs a JSON object with "problem", the JSON of a failure message'
                )
            problem = _problem(record["problem"])
            message = record.get("message", [])
            lines = message if isinstance(message, list) else [message]
            texts = {name: str(record.get(name, "")) for name in ("subject", "guarantee", "why")}
            found = {name: record.get(name) for name in ("output", "tile")}
            versions = record.get("versions", {})
            if not isinstance(versions, dict):
                raise ValueError(f"versions is {versions!r}; needs a JSON object")
            cause = None
            if all(isinstance(text, str) for text in found.values()):
                first = (texts["guarantee"].split() or [""])[0]
                cause = Cause(first, str(found["output"]), str(found["tile"]))
            return cls(
                problem=problem,
                cause=cause,
                message="\n".join(map(str, lines)),
                kernel=str(record.get("kernel", "")),
                versions={str(key): str(value) for key, value in versions.items()},
                **texts,
            )
        except NotReplayableError as error:
            raise NotReplayableError(f"{path}: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}: nested too deeply for a problem") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None


def _problem(record: object) -> Problem:
    """The problem of a file; a mask that is not known is told from a damaged file."""
    try:
        return Problem.from_record(record)
    except UnknownMaskError as error:
        raise NotReplayableError(str(error)) from None


def keep(
    folder: Path,
    entry: CorpusEntry,
    still_fails: Callable[[Problem], bool],
    note: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Writes an entry to its file, unless a smaller one of the same cause is there.

    A file is replaced where it is an entry of the same subject and cause that is larger and still
    fails. One that fails no more stands for a fault of its own that was mended; it stays, as does
    what a person wrote, a ``why`` alone too, or what cannot be read: the entry gets the name with
    the next number.

    Args:
        folder: Where files are; made if it is missing.
        entry: What was found; it has a cause.
        still_fails: Whether the problem of an older file fails by the same cause now.
        note: Is told the file before it is written, so that somebody knows of it whatever happens.

    Returns:
        The file that holds a problem of this cause now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        path, there = _place(folder, entry, still_fails)
        note(path)
        if there is None or complexity(entry.problem) < complexity(there.problem):
            write_atomically(path, entry.to_json())
    return path


def _place(
    folder: Path, entry: CorpusEntry, still_fails: Callable[[Problem], bool]
) -> tuple[Path, CorpusEntry | None]:
    """The file that an entry belongs in, and the entry of its cause that is there."""
    numbers = itertools.count(2)
    path = folder / f"{entry.name}.json"
    while os.path.lexists(path):
        there = _own(path)
        if (
            there is not None
            and _identity(there) == _identity(entry)
            and (there.problem == entry.problem or still_fails(there.problem))
        ):
            return path, there
        path = folder / f"{entry.name}-{next(numbers)}.json"
    return path, None


def _own(path: Path) -> CorpusEntry | None:
    """The entry in a file, as it was written here; None where a person had a hand in it."""
    try:
        there = CorpusEntry.read(path)
    except ValueError:
        return None
    return there if there.why == _in_a_line(there.message) else None


def _in_a_line(message: str) -> str:
    """Why a problem is kept, in the words of its failure message; others are a person's."""
    return message.partition("\n")[0].partition(": ")[2]


def _identity(entry: CorpusEntry) -> tuple[str, str, Cause | None]:
    """What two entries of one fault have in common."""
    return entry.subject, entry.kernel, entry.cause


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process writes entries to the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
