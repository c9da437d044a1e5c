"""The corpus: JSON files with the smallest failing problem of each cause of failure.

Reading a file never evaluates, executes or imports its content. Files that a person has written or
edited are never changed.
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

from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.codec import call_from_record
from fa_verify.oracles.guarantee import guarantee_of
from fa_verify.oracles.masks.codec import UnknownMaskError
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["Cause", "CorpusEntry", "NotReplayableError", "keep"]


class NotReplayableError(ValueError):
    """A regression file is valid, but its mask class is not registered in this run."""


@dataclass(frozen=True)
class Cause:
    """Identifies the cause of a failure by properties of its finding.

    Args:
        guarantee: The first word of the violated guarantee, such as "G1"; or "exception".
        output: The wrong output; for an exception, its type.
        tile: The kind of tile of the worst element, one of ``compare.TILES``; for an exception, the
            file and line that raised it; empty if unknown.
    """

    guarantee: str
    output: str
    tile: str

    @classmethod
    def of(cls, finding: Finding) -> Cause:
        """Return the cause of a finding."""
        if finding.raised:
            raised, _, place = finding.raised.rpartition("\n")
            where = re.search(r"([^/\\(]+), line (\d+)\)$", place)
            line = f"{where[1]}:{where[2]}" if where else ""
            return cls(finding.guarantee, re.split(r"\W", raised or place)[0], line)
        # Drop the shape of scratch memory from the name, as it depends on the problem.
        return cls(guarantee_of(finding.guarantee), finding.output.split(" of ")[0], finding.tile)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.guarantee, self.output, self.tile) if part)


@dataclass(frozen=True)
class CorpusEntry:
    """A failing problem and its failure: the content of a regression file.

    Args:
        problem: The problem.
        subject: Name of the subject that failed.
        guarantee: The violated guarantee, as in the failure message.
        why: Description of the failure.
        cause: The cause; None in a file that a person wrote.
        message: The failure message.
        kernel: Value of --kernel; empty for the project's own kernels.
        versions: Versions of the installed packages, by name.
    """

    problem: Call
    subject: str
    guarantee: str
    why: str
    cause: Cause | None = None
    message: str = ""
    kernel: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, finding: Finding, versions: Mapping[str, str]) -> CorpusEntry:
        """Return the entry for a finding."""
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
        """Name of the file, without a number and the suffix."""
        parts = [self.subject] + ([] if self.cause is None else [*vars(self.cause).values()])
        words = (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in parts)
        return "-".join(word for word in words if word)[:120]

    def to_json(self) -> str:
        """Return indented JSON, as read by ``read``."""
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
        record["problem"] = self.problem.record()
        return json.dumps(record, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> CorpusEntry:
        """Read an entry from a file.

        Raises:
            NotReplayableError: The mask's class is not registered in this run.
            ValueError: The file cannot be read, is not a JSON object, or has no problem. The
                message names the file.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(record, dict) or "problem" not in record:
                raise ValueError('needs a JSON object with "problem", the JSON of a replay line')
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
                cause = Cause(
                    guarantee_of(texts["guarantee"]), str(found["output"]), str(found["tile"])
                )
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
            raise ValueError(f"{path}: the JSON is nested too deeply") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None


def _problem(record: object) -> Call:
    """Read a call, with a separate error for an unknown mask class."""
    try:
        return call_from_record(record)
    except UnknownMaskError as error:
        raise NotReplayableError(str(error)) from None


def keep(
    folder: Path,
    entry: CorpusEntry,
    still_fails: Callable[[Call], bool],
    note: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Write an entry to its file, unless the file holds a smaller one with the same cause.

    An existing file is replaced if it has the same subject and cause, still fails and holds a
    larger problem. Other files with the same name are kept, and the entry's name gets the next
    number. These are files whose problem passes now, since they document a different fault that was
    fixed; files that a person has edited, even if only ``why``; and files that cannot be read.

    Args:
        folder: Folder of the files. It is created if it is missing.
        entry: The entry, with a cause.
        still_fails: Returns whether the problem of an existing file fails now with the same cause.
        note: Called with the file's path before the file is written.

    Returns:
        The path of the file that now holds a problem with this cause.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        path, there = _place(folder, entry, still_fails)
        note(path)
        complexity = kind_of(entry.problem).complexity
        if there is None or complexity(entry.problem) < complexity(there.problem):
            write_atomically(path, entry.to_json())
    return path


def _place(
    folder: Path, entry: CorpusEntry, still_fails: Callable[[Call], bool]
) -> tuple[Path, CorpusEntry | None]:
    """Return the path for an entry, and the existing entry with the same cause at that path."""
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
    """Read an entry; return None if a person has written or edited the file."""
    try:
        there = CorpusEntry.read(path)
    except ValueError:
        return None
    return there if there.why == _in_a_line(there.message) else None


def _in_a_line(message: str) -> str:
    """Return the generated ``why`` of a failure message: its first line without the guarantee."""
    return message.partition("\n")[0].partition(": ")[2]


def _identity(entry: CorpusEntry) -> tuple[str, str, str, Cause | None]:
    """Return the fields that are equal for two entries of the same fault."""
    return entry.problem.kind, entry.subject, entry.kernel, entry.cause


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that no other process writes entries to it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
