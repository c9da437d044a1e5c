"""The common deadline of all processes of a fuzzing run."""

from __future__ import annotations

import math
import time
from pathlib import Path

from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["Clock", "seconds_of_a_turn"]

# Seconds after the deadline in which a search may still shrink a failing problem.
TO_SHRINK = 50.0
# Number of turns that every test should have in a run.
TURNS = 2
# Limits of a turn, in seconds. A shorter turn draws little more than the examples with which every
# turn begins; a longer one delays the turns of other tests.
SHORTEST, LONGEST = 1.0, 10.0


class Clock:
    """A deadline in a file, in seconds of the monotonic clock, shared by processes of one host.

    Args:
        path: The file. There is no deadline until it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: float | None = None

    def start(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now, unless the clock was started or stopped."""
        if not self.path.exists():
            self._started = time.monotonic()
            write_atomically(self.path, repr(self._started + seconds))

    def passed(self) -> float:
        """Return the seconds since ``start`` in the process that called it, 0 in the others."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def stop(self) -> None:
        """Set the deadline to the past, leaving no time to shrink a failing problem either."""
        write_atomically(self.path, repr(-math.inf))

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called in any process."""
        return self._end() == -math.inf

    def over(self) -> bool:
        """Return whether the deadline has passed, so that no new search starts."""
        return time.monotonic() >= self._end()

    def hurried(self) -> bool:
        """Return whether the time to shrink has passed too, so that running searches end."""
        return time.monotonic() >= self._end() + TO_SHRINK

    def _end(self) -> float:
        try:
            return float(self.path.read_text())
        except FileNotFoundError:
            return math.inf


def seconds_of_a_turn(seconds: float, workers: int, tests: int) -> float:
    """Return how long a test may draw before the next test's turn, in seconds.

    Args:
        seconds: Duration of the run.
        workers: Number of worker processes.
        tests: Number of tests that take turns.
    """
    return min(LONGEST, max(SHORTEST, seconds * workers / (TURNS * max(1, tests))))
