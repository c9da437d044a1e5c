"""From a problem that fails to a simpler one that still does, one field at a time.

Hypothesis shrinks what was drawn; what depends on what in the drawing (two lengths share a budget,
a forced feature stays forced) does not bind here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from oracles.mask import Mask
from oracles.problem import LAYOUTS, TENSORS, Problem
from properties.compare import Finding

__all__ = ["simplest", "simplifications"]

_SECONDS = 20.0
_DEFAULT = Problem()


def simplest(
    problem: Problem, findings: list[Finding], check: Callable[[Problem], list[Finding]]
) -> list[Finding]:
    """The findings of the simplest problem reached from one that fails, within 20 seconds.

    Args:
        problem: It fails.
        findings: Its findings.
        check: Findings of a problem; none where it passes or is not supported.
    """
    deadline = time.monotonic() + _SECONDS
    tried = {problem}
    candidates = simplifications(problem)
    while time.monotonic() < deadline:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if candidate in tried:
            continue
        tried.add(candidate)
        found = check(candidate)
        # Another guarantee that fails is another fault, or none of the kernel's.
        if found and found[0].guarantee == findings[0].guarantee:
            findings, candidates = found, simplifications(candidate)
    return findings


def simplifications(problem: Problem) -> Iterator[Problem]:
    """Problems that are simpler in one field, the boldest steps first."""
    yield from _valid(problem, _plainer(problem))
    yield from _valid(problem, _smaller(problem))
    yield from _valid(problem, ({"mask": mask} for mask in _masks(problem)))


def _valid(problem: Problem, changes: Iterator[dict[str, Any]]) -> Iterator[Problem]:
    """The problems that the changes give, where they make sense together."""
    for change in changes:
        try:
            yield dataclasses.replace(problem, **change)
        except ValueError:
            continue


def _plainer(problem: Problem) -> Iterator[dict[str, Any]]:
    """Fields at their defaults; dtype and configuration stay, they say which kernel it is."""
    for name in ("inputs", "dout", "dirty", "sm_scale", "seed"):
        if getattr(problem, name) != getattr(_DEFAULT, name):
            yield {name: getattr(_DEFAULT, name)}
    for place in range(len(TENSORS)):
        if problem.layouts[place] != LAYOUTS[0]:
            layouts = (*problem.layouts[:place], LAYOUTS[0], *problem.layouts[place + 1 :])
            yield {"layouts": layouts}


def _smaller(problem: Problem) -> Iterator[dict[str, Any]]:
    """Smaller sizes; lengths and batch entries of the mask go with them."""
    if problem.B > 1:
        for b in range(problem.B):
            yield {"B": 1, "mask": _of_entry(problem.mask, b)}
    if problem.H > 1:
        yield {"H": 1, "Hk": 1}
        yield {"H": problem.Hk}
        yield {"H": problem.G, "Hk": 1}
    for name in ("M", "N"):
        for size in _steps(getattr(problem, name)):
            yield {name: size, "mask": _cut(problem.mask, name, size)}
    for dims in ({"D": 16, "Dv": 16}, {"D": 16}, {"Dv": 16}):
        if any(getattr(problem, name) != size for name, size in dims.items()):
            yield dict(dims)


def _steps(size: int) -> Iterator[int]:
    """Smaller positive sizes: 1, then half, then ever closer."""
    if size > 1:
        yield 1
        step = size // 2
        while step:
            yield size - step
            step //= 2


def _of_entry(mask: Mask, b: int) -> Mask:
    rows, keys = mask.seqlens_q, mask.seqlens_k
    return dataclasses.replace(
        mask,
        seqlens_q=None if rows is None else rows[b : b + 1],
        seqlens_k=None if keys is None else keys[b : b + 1],
    )


def _cut(mask: Mask, name: str, size: int) -> Mask:
    """The mask of a shorter sequence."""
    field = "seqlens_q" if name == "M" else "seqlens_k"
    lengths = getattr(mask, field)
    if lengths is None:
        return mask
    cut: dict[str, Any] = {field: tuple(min(length, size) for length in lengths)}
    return dataclasses.replace(mask, **cut)


def _masks(problem: Problem) -> Iterator[Mask]:
    """Simpler masks: a part less, then a smaller window, then lengths nearer to full."""
    mask = problem.mask
    changes: list[dict[str, Any]] = [
        {"causal": False},
        {"window_left": None},
        {"window_right": None},
        {"seqlens_q": None},
        {"seqlens_k": None},
        {"window_right": 0},
        {"window_left": 0},
    ]
    for field, size in (("seqlens_q", problem.M), ("seqlens_k", problem.N)):
        lengths = getattr(mask, field) or ()
        for b, length in enumerate(lengths):
            if length < size:
                changes.append({field: (*lengths[:b], length + 1, *lengths[b + 1 :])})
    for change in changes:
        ((name, value),) = change.items()
        if getattr(mask, name) not in (value, None):
            yield dataclasses.replace(mask, **change)
