"""The problems of a quick run, chosen by the mutants that they kill, and fitted to a subject.

``quick.json`` lists them, the deadliest first. ``python -m tests.mutation.quick choose`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.covering_problems import covering_problems
from fa_verify.properties.kernels.declared_values import Value, examples, values_of
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.properties.kernels.subject import Subject
from fa_verify.shards import has_table, shared_kernels

__all__ = ["FILE", "Entry", "entries", "entries_for"]

FILE = Path(__file__).with_suffix(".json")
# Calls that differ in one argument each compile kernels for over a minute, in one process.
COMPILED = {"sequence"}
# Limit on the tile pairs of the problems that have every two values: seconds in the interpreter.
_TILE_PAIRS = 24


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
    """Yield problems that a subject supports, each once.

    Problems that have every two values of shape and mask come first, then the entries, and problems
    with the declared values that none of these has. The project's own kernels, for which the
    entries were chosen, have these alone: others would compile more of them. On a GPU entries are
    without sequences of calls.
    """
    had: set[Value] = set()
    if not has_table(subject) and subject.attends:
        array = covering_problems(
            subject, device, most=_TILE_PAIRS, pairs=True, kernels=shared_kernels(subject, device),
        )  # fmt: skip
        for problem in array.calls:
            had |= values_of(subject, problem)
            yield Entry(problem, ())
    left_out = set() if device == "cpu" else COMPILED
    seen: set[tuple[Problem, tuple[str, ...]]] = set()
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
