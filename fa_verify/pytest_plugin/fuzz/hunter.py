"""A runner that ends in time, holds to one cause, and writes down at once what fails."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import time
from pathlib import Path

import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.guarantees import Check
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.search.corpus import Cause, CorpusEntry, keep
from fa_verify.properties.search.search import Runner
from fa_verify.pytest_plugin.fuzz.causes import Causes
from fa_verify.pytest_plugin.fuzz.clock import Clock

__all__ = ["FEWEST", "TURN_OVER", "Hunter"]

TURN_OVER = "the turn is over"
# Problems of a turn, however long they take: the first that Hypothesis draws is always the same.
FEWEST = 6


class Hunter(Runner):
    """Judges problems for one turn of one test.

    The first cause of failure that nobody in the run has found is this turn's: a problem that fails
    by it counts, and the smallest is on disk all the time. One that fails by another cause counts
    as passing, else the search for a smaller problem would wander from fault to fault; it is kept
    as it is, where nobody has that cause.

    Args:
        runner: Its subject, tally and watchdog are used.
        folder: Where the corpus is kept.
        causes: What the run has found.
        clock: When the run ends.
        seconds: How long the turn is, but for the fewest problems of any.
    """

    def __init__(
        self, runner: Runner, *, folder: Path, causes: Causes, clock: Clock, seconds: float
    ) -> None:
        super().__init__(runner.subject, runner.tally, runner.watching)
        self.folder = folder
        self.causes = causes
        self.clock = clock
        self.end = time.monotonic() + seconds
        self.tried = 0
        self.cause: Cause | None = None
        # Whether the last problem failed by a cause that is known.
        self.passed_over = False
        self._failed: set[tuple[Cause, Problem]] = set()

    def findings(self, problem: Problem, claim: Check) -> list[Finding]:
        """``Runner.findings`` where they are of this turn's cause.

        Raises:
            pytest.skip.Exception: The turn is over, and nothing was found; a search ends by it.
        """
        late = time.monotonic() >= self.end and self.tried >= FEWEST
        if self.cause is None and (late or self.clock.over()):
            pytest.skip(TURN_OVER)
        if self.cause is not None and self.clock.hurried():
            return []
        self.passed_over = False
        self.tried += 1
        found = super().findings(problem, claim)
        if not found:
            return []
        cause = Cause.of(found[0])
        if self.cause is None and self.causes.claim(cause):
            self.cause = cause
        if cause == self.cause or not self.causes.claimed(cause):
            self._keep(cause, found[0], claim)
        if cause == self.cause:
            return found
        self.passed_over = True
        return []

    def _keep(self, cause: Cause, finding: Finding, claim: Check) -> None:
        """Writes the finding's problem down, if it is the smallest so far."""
        self._failed.add((cause, finding.problem))

        def still_fails(problem: Problem) -> bool:
            # A kernel that fails now and then has failed.
            if (cause, problem) in self._failed:
                return True
            here = dataclasses.replace(problem, device=finding.problem.device)
            return [Cause.of(x) for x in super(Hunter, self).findings(here, claim)[:1]] == [cause]

        entry = CorpusEntry.of(finding, _versions())
        keep(self.folder, entry, still_fails, lambda path: self.causes.note(cause, path))


def _versions() -> dict[str, str]:
    """Of what may decide whether a problem fails."""
    packages = [name for name in ("torch", "triton") if importlib.util.find_spec(name)]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
