"""Run callables in forks of this process, several at a time, each with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

__all__ = ["Ended", "in_forks"]


class Ended(NamedTuple):
    """The end of one callable.

    Args:
        number: Index of the callable, in the order given.
        value: Its return value; None if it did not return.
        how: "returned", "crashed" or "timed out".
        seconds: Seconds from the fork to the end.
    """

    number: int
    value: Any
    how: str
    seconds: float


class _Fork(NamedTuple):
    number: int
    process: BaseProcess
    pipe: Connection
    started: float


def in_forks(
    works: Iterable[Callable[[], object]], *, jobs: int, seconds: float
) -> Iterator[Ended]:
    """Run each callable in a fork and yield how it ended, in the order in which they end.

    A fork inherits the memory of this process, so it starts at once. Its changes and its death do
    not affect this process. Call this with a single thread running: a lock that another thread
    holds during a fork stays locked in the child.

    Args:
        works: Callables whose results can be pickled.
        jobs: Number of forks that run at a time.
        seconds: Time limit of a callable, after which its fork is killed.
    """
    waiting = enumerate(works)
    running: dict[int, _Fork] = {}
    exhausted = False
    try:
        while True:
            while not exhausted and len(running) < jobs:
                number, work = next(waiting, (-1, None))
                if work is None:
                    exhausted = True
                else:
                    running[number] = _start(number, work)
            if not running:
                return
            for ended in _poll(running, seconds):
                del running[ended.number]
                yield ended
    finally:
        for fork in running.values():
            _kill(fork.process)


def _start(number: int, work: Callable[[], object]) -> _Fork:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, here, there))
    process.start()
    there.close()
    return _Fork(number, process, here, time.monotonic())


def _run(work: Callable[[], object], here: Connection, there: Connection) -> None:
    """Run in the fork, in a new process group, so that its children are killed with it."""
    os.setpgid(0, 0)
    here.close()
    there.send(work())


def _poll(running: dict[int, _Fork], seconds: float) -> list[Ended]:
    """Wait until a fork may have ended, and return those that have."""
    now = time.monotonic()
    first = min(fork.started + seconds for fork in running.values())
    wait([fork.pipe for fork in running.values()], timeout=max(0.0, first - now))
    return [ended for fork in running.values() if (ended := _end_of(fork, seconds)) is not None]


def _end_of(fork: _Fork, seconds: float) -> Ended | None:
    """Return how a fork ended; None while it runs."""
    value, how = None, "timed out"
    if fork.pipe.poll():
        try:
            value, how = fork.pipe.recv(), "returned"
        except EOFError:
            how = "crashed"
    elif time.monotonic() - fork.started < seconds:
        return None
    _kill(fork.process)
    fork.pipe.close()
    return Ended(fork.number, value, how, time.monotonic() - fork.started)


def _kill(process: BaseProcess) -> None:
    """Kill a fork and its children."""
    assert process.pid is not None  # it has started
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.join()
