"""A limit of CPU time, which tells a mutant that hangs from one that the machine's load slows down.

Wall time cannot tell: of a few survivors, each of which takes a minute of CPU time, some took more
than five minutes on a loaded machine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType

from tests.mutation.catalogue.mutant import Kill
from tests.mutation.catalogue.outcomes import HANGS

__all__ = ["kills_within"]


class _HungError(BaseException):
    """The time is over. Handlers of Exception, in the mutant or in a test, let it pass."""


def kills_within(seconds: float, kills: Iterable[Kill], what: str) -> list[Kill]:
    """The kills, or those before ``seconds`` of CPU time and one of the check ``HANGS``.

    Args:
        seconds: The limit, in seconds of this process's CPU time.
        kills: A lazy iterable.
        what: Name of the work, for the message.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _HungError

    found = []
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        for kill in kills:
            found.append(kill)
    except _HungError:
        found.append(Kill(HANGS, -1, f"more than {seconds:.0f} s of CPU time: {what}"[:500]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return found
