"""Smaller problems for kernels that would take long, by the seconds of a small one."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, run_trial
from fa_verify.properties.search.search import Runner

__all__ = ["SECONDS", "sized"]

# Seconds of CPU time that a problem of fixed size takes at most: a third of the watchdog's limit.
SECONDS = 20.0
# Pairs of a query row and a key, over heads, of the problem that is timed. In the interpreter they
# are a hundred tiles or less.
_TIMED = 2**15


def sized(
    runner: Runner,
    problem: Problem,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.process_time,
) -> Problem:
    """Return a problem with fewer rows and keys, if a kernel on a CPU would take long; else itself.

    A part of the problem is run first, and its time is extrapolated by the pairs of rows and keys.

    Args:
        runner: The runner of the kernel, whose watchdog sees the part.
        problem: The problem.
        seconds: The most CPU time of the kernel and the reference.
        clock: The CPU time, in seconds.
    """
    if problem.device != "cpu" or problem.pairs <= 4 * _TIMED:
        return problem
    subject = runner.subject
    part = _scaled(subject, problem, _TIMED / problem.pairs)
    if part is None:
        return problem
    start = clock()
    try:
        with runner.watching(part):
            run_trial(subject, part)
    except (NotImplementedError, SubjectError):
        return problem
    expected = (clock() - start) * problem.pairs / part.pairs
    if expected <= seconds:
        return problem
    return _scaled(subject, problem, max(seconds / expected, part.pairs / problem.pairs)) or problem


def _scaled(subject: Subject, problem: Problem, share: float) -> Problem | None:
    """Return a problem of that share of the pairs; None if its mask does not fit fewer rows."""
    multiple = subject.seqlen_multiple
    M, N = (
        max(multiple, int(size * math.sqrt(share)) // multiple * multiple)
        for size in (problem.M, problem.N)
    )
    try:
        return narrowed(subject, dataclasses.replace(problem, M=M, N=N))
    except ValueError:
        return None
