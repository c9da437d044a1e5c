"""A runner with a deadline that follows one cause of failure and saves failing problems at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fa_verify.oracles.call import Call, changed
from fa_verify.properties.guarantees.claims import Check
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.search.corpus import Cause, CorpusEntry, keep
from fa_verify.properties.search.search import Runner
from fa_verify.pytest_plugin.fuzz.causes import Causes
from fa_verify.pytest_plugin.fuzz.clock import Clock
from fa_verify.session import TURN_OVER

__all__ = ["FEWEST", "Hunter"]

# Minimum number of problems in a turn: the first one that Hypothesis draws is always the same.
FEWEST = 6


class Hunter(Runner):
    """Judges problems for one turn of one test.

    A turn follows the first cause of failure that no other search in the run has claimed. A problem
    that fails with this cause counts as failing, and the smallest one so far is always on disk.

    A problem that fails with another cause counts as passing: otherwise shrinking would drift from
    one fault to another. It is saved without shrinking if no search has claimed its cause.

    Args:
        runner: Provides the subject, the tally and the watchdog.
        folder: The folder of the corpus.
        causes: The causes claimed in this run.
        clock: The deadline of the run.
        seconds: Duration of the turn in seconds. A turn tries at least ``FEWEST`` problems.
        unkept: Receives the cause and the finding of a problem that cannot be written, and why.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        folder: Path,
        causes: Causes,
        clock: Clock,
        seconds: float,
        unkept: Callable[[Cause, Finding, OSError], None],
    ) -> None:
        super().__init__(
            runner.subject, runner.tally, runner.watching, runner.mask, runner.waived, runner.asks
        )
        self.folder = folder
        self.causes = causes
        self.clock = clock
        self.unkept = unkept
        self.end = time.monotonic() + seconds
        self.tried = 0
        self.cause: Cause | None = None
        # Whether the last problem failed with a cause other than this turn's.
        self.passed_over = False
        self._failed: set[tuple[Cause, Call]] = set()

    def findings(self, problem: Call, claim: Check) -> list[Finding]:
        """Return the findings of ``Runner.findings`` if they have this turn's cause.

        Raises:
            pytest.skip.Exception: The turn is over and has found nothing. This ends the search.
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
        """Save the finding's problem if it is the smallest one with its cause so far."""
        self._failed.add((cause, finding.problem))

        def still_fails(problem: Call) -> bool:
            # A problem that failed once counts as failing, even if the kernel fails only sometimes.
            if (cause, problem) in self._failed:
                return True
            here: Call = changed(problem, device=finding.problem.device)
            return [Cause.of(x) for x in super(Hunter, self).findings(here, claim)[:1]] == [cause]

        entry = CorpusEntry.of(finding, _versions())
        try:
            keep(self.folder, entry, still_fails, lambda path: self.causes.note(cause, path))
        except OSError as error:
            # Such as a full disk, which is no fault of the kernel. The run goes on.
            self.unkept(cause, finding, error)


def _versions() -> dict[str, str]:
    """Return the versions of packages that can affect whether a problem fails."""
    packages = [name for name in ("torch", "triton") if importlib.util.find_spec(name)]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
