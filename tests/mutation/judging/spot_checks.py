"""Spot checks of the mutants listed as equivalent, in every run.

A reason can be wrong, and after an edit of the sources a key can stand for another mutant. A step
that runs the changed line is likely to show either. All steps take 30 s for each mutant; the spot
checks take one or two.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fa_verify.diagnosis.copies import PACKAGE, load
from fa_verify.properties.execution.trial import PlannedRun
from fa_verify.properties.subjects.subject import Subject
from fa_verify.subjects.ours import adapted
from tests.mutation.judging.trials import CHECKS, Step
from tests.mutation.mutants.changes import Change

__all__ = ["MOST", "Lines", "lines_run", "steps_of"]

# Most steps for each mutant.
MOST = 4
# Lines as (path from the root of the repository, number).
Lines = frozenset[tuple[str, int]]


def lines_run(
    sources: Mapping[str, str], steps: Sequence[Step], questions: Sequence[PlannedRun]
) -> list[Lines]:
    """The lines of the package that each step runs.

    Call it in a process that does nothing else afterwards.

    Args:
        sources: The package, a copy of which runs.
        steps: The steps.
        questions: The planned run of each step.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="traced-") as name:
        folder = Path(name) / Path(name).name.replace("-", "_")
        subject = Subject.of(adapted(load(sources, folder)), "traced")
        for step, question in zip(steps, questions, strict=True):
            lines: set[tuple[str, int]] = set()
            with _tracing(folder, lines):
                trial = question.run(subject)
                for check in step.checks:
                    CHECKS[check](trial)
            found.append(frozenset(lines))
    return found


@contextmanager
def _tracing(folder: Path, lines: set[tuple[str, int]]) -> Iterator[None]:
    """Records every line that runs in a folder, in this thread and in threads it starts."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        path = paths.get(frame.f_code.co_filename)
        if path is None:
            path = ""
            if Path(frame.f_code.co_filename).is_relative_to(folder):
                path = f"{PACKAGE}/{Path(frame.f_code.co_filename).relative_to(folder).as_posix()}"
            paths[frame.f_code.co_filename] = path
        if not path:
            return None
        if event == "line":
            lines.add((path, frame.f_lineno))
        return trace

    paths: dict[str, str] = {}
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def steps_of(change: Change, run: Sequence[Lines], most: int = MOST) -> list[int]:
    """The indices of a few steps, spread over those that run a mutant's change, or over all.

    Args:
        change: The mutant's change.
        run: The lines that each step runs; empty sets if they are not traced.
        most: Most steps to return.
    """
    wanted = {(change.file, line) for line in change.lines}
    able = [number for number, lines in enumerate(run) if not wanted.isdisjoint(lines)]
    able = able or list(range(len(run)))
    if len(able) <= most:
        return able
    return [able[round(i * (len(able) - 1) / (most - 1))] for i in range(most)]
