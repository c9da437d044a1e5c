"""The problems of a quick run, chosen by the mutants that they kill, and fitted to a subject.

``quick.json`` lists them, the deadliest first. ``python -m tests.mutation.quick choose`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fa_verify.oracles.problem import Problem
from fa_verify.properties.subjects.declared_values import Value, examples, values_of
from fa_verify.properties.subjects.fitting import fitted
from fa_verify.properties.subjects.subject import Subject
from fa_verify.shards import has_table

__all__ = ["FILE", "Entry", "entries", "entries_for"]

FILE = Path(__file__).with_suffix(".json")
# Calls that differ in one argument each compile kernels for over a minute, in one process.
COMPILED = {"sequence"}


@dataclass(frozen=True)
class Entry:
    """A problem and the names of its checks; the standing checks run beside them."""

    problem: Problem
    checks: tuple[str, ...]


def entries() -> tuple[Entry, ...]:
    """Return the entries of the file, the deadliest first."""
    return tuple(
        Entry(Problem.from_record(x["problem"]), tuple(x["checks"]))
        for x in json.loads(FILE.read_text(encoding="utf-8"))
    )


def entries_for(subject: Subject, device: str) -> Iterator[Entry]:
    """Yield the entries as problems that a subject supports, each once.

    Problems with the declared values that no entry has follow. The entries were chosen for the
    project's own kernels, which other problems would compile more of. On a GPU they are without
    sequences of calls.
    """
    left_out = set() if device == "cpu" else COMPILED
    seen: set[tuple[Problem, tuple[str, ...]]] = set()
    had: set[Value] = set()
    for entry in entries():
        problem = fitted(subject, entry.problem, device)
        checks = tuple(x for x in entry.checks if x not in left_out)
        if problem is not None and (problem, checks) not in seen:
            seen.add((problem, checks))
            had |= values_of(subject, problem)
            yield Entry(problem, checks)
    if has_table(subject):
        return
    for problem in examples(subject, device, had):
        yield Entry(problem, ())
