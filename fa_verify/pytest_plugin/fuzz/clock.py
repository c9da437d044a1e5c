"""When drawing ends, for all processes of a run at once: by the clock, or because somebody asks."""

from __future__ import annotations

import math
import time
from pathlib import Path

from fa_verify.properties.execution.atomic_write import write_atomically

__all__ = ["Clock", "seconds_of_a_turn"]

# What a search that has found something may take beyond the end to make it smaller.
TO_SHRINK = 50.0
# Every claim and shard is to have this many turns in a run.
TURNS = 2
# In less than the first a turn draws little but what every turn begins with; longer than the second
# nobody is to wait for the next.
SHORTEST, LONGEST = 1.0, 10.0


class Clock:
    """A deadline in a file, in seconds of the monotonic clock, which the processes of a host share.

    Args:
        path: The file. Until it is there, nothing ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: float | None = None

    def start(self, seconds: float) -> None:
        """Lets the time run, unless it does or was stopped."""
        if not self.path.exists():
            self._started = time.monotonic()
            write_atomically(self.path, repr(self._started + seconds))

    def passed(self) -> float:
        """Seconds since the start, in the process that started it."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def stop(self) -> None:
        """Ends the time now, also what is left to make a corpus entry smaller."""
        write_atomically(self.path, repr(-math.inf))

    @property
    def stopped(self) -> bool:
        """Whether somebody ended it."""
        return self._end() == -math.inf

    def over(self) -> bool:
        """Whether nothing new is to be begun."""
        return time.monotonic() >= self._end()

    def hurried(self) -> bool:
        """Whether what is under way is to end as it is."""
        return time.monotonic() >= self._end() + TO_SHRINK

    def _end(self) -> float:
        try:
            return float(self.path.read_text())
        except FileNotFoundError:
            return math.inf


def seconds_of_a_turn(seconds: float, workers: int, tests: int) -> float:
    """How long one test may draw before the next has its turn.

    Args:
        seconds: Of the whole run.
        workers: Processes that draw.
        tests: How many there are to take turns.
    """
    return min(LONGEST, max(SHORTEST, seconds * workers / (TURNS * max(1, tests))))
