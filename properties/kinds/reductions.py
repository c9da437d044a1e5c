"""Simpler problems of attention to padded tensors, each simpler in one field.

This continues where Hypothesis's shrinking ends. Hypothesis shrinks the draw and must respect its
constraints: for example, lengths share a budget and forced features stay forced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fa_verify.oracles.call import variants
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import LAYOUTS, TENSORS, Problem
from fa_verify.properties.problems.mask_classes import bounds_of

__all__ = ["complexity", "reductions", "steps"]

_DEFAULT = Problem()
_PLAIN = (
    "inputs",
    "dout",
    "dlse",
    "dirty",
    "sm_scale",
    "seed",
    "seeds",
    "softcap",
    "alibi",
    "bias",
    "sinks",
)


def complexity(problem: Problem) -> tuple[int, ...]:
    """Return a sort key of problems, which decreases in each of the ``reductions``.

    Compares sizes first, then the number of fields that differ from their default, then the mask:
    its number of parts, the reach of its window, and the amount of padding.
    """
    mask = problem.mask
    sizes = (problem.B, problem.H, problem.Hk, problem.M, problem.N)
    dims = (size for size in (problem.D, problem.Dv) if size != _DEFAULT.D)
    fields = (getattr(problem, name) != getattr(_DEFAULT, name) for name in _PLAIN)
    parts = (getattr(mask, item.name) != item.default for item in dataclasses.fields(mask))
    reach = (mask.window_left or 0) + (mask.window_right or 0) + _weight(mask)
    rows, keys = mask.lengths(problem.B, problem.M, problem.N)
    left_out = problem.B * (problem.M + problem.N) - sum(rows) - sum(keys)
    layouts = sum(layout != LAYOUTS[0] for layout in problem.layouts)
    return sum(sizes) + sum(dims), sum(fields) + layouts, sum(parts), reach, left_out


def _weight(mask: Mask) -> int:
    """Return the complexity of a mask's predicate: its class, ints, and lengths of tuples."""
    if mask.is_plain:
        return 0
    own = [
        getattr(mask, item.name)
        for item in dataclasses.fields(mask)[len(dataclasses.fields(Mask)) :]
    ]
    parts = sum(_weight(value) for value in own if isinstance(value, Mask))
    ints = sum(abs(value) for value in own if type(value) is int)
    return 1 + parts + ints + sum(len(value) for value in own if isinstance(value, tuple))


def reductions(problem: Problem) -> Iterator[Problem]:
    """Yield problems that are simpler in one field, largest steps first."""
    yield from _shorter(problem)
    yield from variants(problem, _plainer(problem))
    yield from variants(problem, _smaller(problem))
    yield from variants(problem, ({"mask": mask} for mask in _masks(problem)))


def _shorter(batched: Problem) -> Iterator[Problem]:
    """Yield the halves of a batched problem."""
    count = len(batched.seeds)
    if count:
        yield batched.part(0, count // 2)
        yield batched.part(count // 2, count)


def _plainer(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield changes of one field to its default, except dtype and configuration."""
    for name in _PLAIN:
        if getattr(problem, name) != getattr(_DEFAULT, name):
            yield {name: getattr(_DEFAULT, name)}
    for place in range(len(TENSORS)):
        if problem.layouts[place] != LAYOUTS[0]:
            layouts = (*problem.layouts[:place], LAYOUTS[0], *problem.layouts[place + 1 :])
            yield {"layouts": layouts}


def _smaller(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield changes to smaller sizes, with the mask's lengths and batch entries adapted."""
    B, Hk, G = problem.B, problem.Hk, problem.G
    for kept in _fewer(B):
        yield {"B": len(kept), "mask": problem.mask.sliced(kept)}
    for size in steps(G):
        yield {"H": Hk * size}
    for size in steps(Hk):
        yield {"H": size * G, "Hk": size}
    # M and N together first: a subject may need M = N.
    for names in (("M", "N"), ("M",), ("N",)):
        if len({getattr(problem, name) for name in names}) == 1:
            for size in steps(getattr(problem, names[0])):
                for mask in _cut(problem, names, size):
                    yield {**dict.fromkeys(names, size), "mask": mask}
    plain = _DEFAULT.D
    for names in (("D", "Dv"), ("D",), ("Dv",)):
        yield dict.fromkeys(names, plain)
        larger = {getattr(problem, name) - plain for name in names}
        if len(larger) == 1:
            for more in steps(max(0, *larger)):
                yield dict.fromkeys(names, plain + more)


def steps(size: int) -> Iterator[int]:
    """Yield smaller positive sizes: 1, then ``size`` minus decreasing powers of two.

    For a subject that needs multiples of a power of two, each multiple leads to smaller ones.
    """
    if size > 1:
        yield 1
        step = 1 << (size - 1).bit_length() - 1
        while step:
            yield size - step
            step //= 2


def _fewer(B: int) -> Iterator[tuple[int, ...]]:
    """Yield the batch entries to keep: a single one, then all but one."""
    entries = range(B)
    if B > 1:
        yield from ((b,) for b in entries)
    if B > 2:
        yield from (tuple(other for other in entries if other != b) for b in entries)


def _cut(problem: Problem, names: tuple[str, ...], size: int) -> Iterator[Mask]:
    """Yield masks for shorter M, N or both, removing padding first or keeping all of it.

    A sequence that is not empty stays so, since an empty one is a separate case.
    """
    less: dict[str, Any] = {}
    all_of_it: dict[str, Any] = {}
    for name in names:
        field = "seqlens_q" if name == "M" else "seqlens_k"
        lengths, gone = getattr(problem.mask, field), getattr(problem, name) - size
        if lengths is not None:
            less[field] = tuple(min(length, size) for length in lengths)
            all_of_it[field] = tuple(max(min(1, length), length - gone) for length in lengths)
    yield dataclasses.replace(problem.mask, **less)
    if all_of_it != less:
        yield dataclasses.replace(problem.mask, **all_of_it)


def _plainer_predicates(mask: Mask) -> Iterator[Mask]:
    """Yield masks without the predicate, with a part of it, then with smaller fields."""
    rows, keys = mask.seqlens_q, mask.seqlens_k
    yield Mask(
        window_left=mask.window_left, window_right=mask.right, seqlens_q=rows, seqlens_k=keys
    )
    for item in dataclasses.fields(mask)[len(dataclasses.fields(Mask)) :]:
        value = getattr(mask, item.name)
        if isinstance(value, Mask):
            yield dataclasses.replace(value, seqlens_q=rows, seqlens_k=keys)
            continue
        nearer: list[Any] = [item.default]
        if isinstance(value, tuple):
            nearer += [value[:-1], value[1:]]
        elif type(value) is int:
            allowed = bounds_of(type(mask), item.name)
            nearer += [x for x in (0, 1, value // 2, value - 1) if x in allowed]
        for other in nearer:
            try:
                yield dataclasses.replace(mask, **{item.name: other})
            except (TypeError, ValueError):
                continue


def _masks(problem: Problem) -> Iterator[Mask]:
    """Yield simpler masks: without a part, then with a smaller window, then with less padding."""
    mask = problem.mask
    if not mask.is_plain:
        yield from _plainer_predicates(mask)
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
            nearer = {size, size - 1, (length + size) // 2, length + 1}
            for longer in sorted(nearer, reverse=True):
                if longer > length:
                    changes.append({field: (*lengths[:b], longer, *lengths[b + 1 :])})
    for change in changes:
        ((name, value),) = change.items()
        if getattr(mask, name) not in (value, None):
            yield dataclasses.replace(mask, **change)
