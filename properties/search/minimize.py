"""Minimise a failing call of any kind by simplifying one field at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from fa_verify.oracles.call import Call, variants
from fa_verify.properties.kinds.registry import kind_of

__all__ = ["minimized"]

# CPU time, and time on the clock where other processes share it.
_SECONDS, _ON_THE_CLOCK = 20.0, 60.0


class _Failure(Protocol):
    """A failure, such as a ``Finding``."""

    @property
    def guarantee(self) -> str:
        """The violated guarantee."""

    @property
    def problem(self) -> Call:
        """The call that violates it."""


_Found = TypeVar("_Found", bound=_Failure)


def minimized(
    problem: Call,
    findings: list[_Found],
    check: Callable[[Any], list[_Found]],
    first: Sequence[dict[str, Any]] = (),
) -> list[_Found]:
    """Simplify a failing call for up to 20 s of CPU time; return the findings of the simplest one.

    Args:
        problem: The failing call.
        findings: Its findings.
        check: Returns the findings of a call; none if it passes or is not supported.
        first: Changes of fields to try before the ``reductions``.
    """

    def candidates_of(call: Call) -> Iterator[Call]:
        return chain(variants(call, first), kind_of(call).reductions(call))

    complexity = kind_of(problem).complexity
    ends = time.process_time() + _SECONDS, time.monotonic() + _ON_THE_CLOCK
    tried = {problem}
    candidates = candidates_of(problem)
    while time.process_time() < ends[0] and time.monotonic() < ends[1]:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if candidate in tried:
            continue
        tried.add(candidate)
        found = check(candidate)
        # If another guarantee fails, this may be another fault.
        if not found or found[0].guarantee != findings[0].guarantee:
            continue
        # A check may show another call that is wrong, which can be less simple.
        if complexity(found[0].problem) <= complexity(findings[0].problem):
            findings, candidates = found, candidates_of(candidate)
    return findings
