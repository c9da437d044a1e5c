"""Key tiles: their width and order, splits, and the rise at which a row is rescaled.

A weight that an earlier tile added is multiplied by a factor in float32 when the maximum rises. A
weight of the tile of the maximum is rounded to the dtype of P. Only kernels that round P show it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from fa_verify.oracles.outputs import MOST_PUT_OFF
from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.experiments import Experiment, Observation, experiment, observe
from fa_verify.probing.formats import UNIT, clear_of_ties, rounded
from fa_verify.probing.rounding import FAR, FLOAT32, PRESCALES, score, tensors
from fa_verify.probing.trying import attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["tiles_of"]

# Tiles are multiples of this width.
_STEP = 8


@experiment("tiles")
def _tiles(subject: Subject, which: Experiment) -> Observation:
    """For a key of the largest score and another key, tell whether their tiles differ.

    Batch entry j has the largest score at key 8 j. Column i of v holds 1 at key 8 i and -c at key
    8 j, where c is the weight of key 8 i rounded to the dtype. So out is 0, unless the weight was
    added before the maximum rose, or by another split. The number is the way of prescaling.
    """
    problem = which.problem
    dtype, s, M, N, D, Dv = (
        problem.dtype, problem.scale, problem.M, problem.N, problem.D, problem.Dv
    )  # fmt: skip
    way = [*PRESCALES][which.numbers[0]]
    places = torch.arange(0, N, _STEP)
    n = len(places)
    a, b = torch.tensor(1.0).double(), _peak(s, way, dtype)
    factor = (-score(a, b, s, way, dtype)[0]).exp()
    c = rounded(factor, dtype)
    slices = -(-n // Dv)
    entries = n * slices
    q = torch.zeros(entries, 1, M, D, dtype=torch.float64)
    q[..., 0] = a
    k = torch.zeros(entries, 1, N, D, dtype=torch.float64)
    v = torch.zeros(entries, 1, N, Dv, dtype=torch.float64)
    for entry in range(entries):
        j, part = divmod(entry, slices)
        k[entry, 0, places[j], 0] = b
        v[entry, 0, places[j]] = -c
        for column, i in enumerate(range(part * Dv, min(n, (part + 1) * Dv))):
            if i != j:
                v[entry, 0, places[i], column] = 1
    problem = dataclasses.replace(problem, B=entries)
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v), backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    out = tried.got.out[:, 0, -1].double().cpu().view(n, slices * Dv)[:, :n]
    total = 1 + (N - 1) * factor
    same, apart = torch.zeros_like(out), torch.full_like(out, ((factor - c) / total).item())
    eye = torch.eye(n, dtype=torch.bool)
    got = out.masked_fill(eye, 0.0)
    tolerance = torch.full_like(got, (abs(factor - c) / 4 / total).item())
    expected = {"same or later tile": same, "earlier tile or another split": apart}
    return Observation(got, expected, dict.fromkeys(expected, tolerance))


def _peak(s: float, way: str, dtype: str) -> torch.Tensor:
    """Return an element of k whose score gives a weight near 2**-10 that rounding changes most."""
    b = rounded((7.2 + torch.arange(64, dtype=torch.float64) / 512) / s, dtype).unique()
    x, clear = score(torch.ones_like(b), b, s, way, dtype)
    weight = (-x).exp()
    error = ((rounded(weight, dtype) - weight) / weight).abs()
    return b[(error * (clear & clear_of_ties(weight, dtype))).argmax()]


def tiles_of(subject: Subject, problem: Problem, way: str) -> Iterator[Answer]:
    """Yield block_n, the order of the key tiles, splits and the rescale threshold.

    Args:
        subject: The kernel without its declarations.
        problem: Sizes and a 16-bit dtype, with several tiles of keys.
        way: The way of prescaling, a key of ``PRESCALES``.
    """
    number = [*PRESCALES].index(way)
    which = Experiment("tiles", problem, (number,))
    seen = observe(subject, which)
    words = ("block_n", "tile_order", "splits", "rescale_threshold")
    if seen.got is None:
        yield from (undecided(word, seen.error, which.to_json()) for word in words)
        return
    tolerance, apart = seen.tolerance["same or later tile"], None
    near = {name: (seen.got - x).abs() <= tolerance for name, x in seen.expected.items()}
    if bool((near["same or later tile"] | near["earlier tile or another split"]).all()):
        apart = near["earlier tile or another split"].tolist()
    shape = None if apart is None else _partition(apart)
    if shape is None:
        why = "weights of P show no tiles: P stays in fp32, is normalised, or one tile has all keys"
        if apart is not None and not any(map(any, apart)):
            why = f"one tile holds {problem.N} keys"
        yield from (undecided(word, why, which.to_json()) for word in words)
        return
    width, order, splits = shape
    of = f"N={problem.N} {problem.dtype}"
    said = f"weights within {width} keys are rounded together, at {of}"
    yield Answer("block_n", width, "shown", said, which.to_json())
    yield Answer("tile_order", order, "shown", f"{order} at {of}", which.to_json())
    said = f"{splits} groups of tiles have a maximum of their own, at {of}"
    yield Answer("splits", splits, "tried", said, which.to_json())
    if splits > 1:
        yield undecided("rescale_threshold", "tiles are split")
        return
    yield _threshold(subject, problem, number, width, order)


def _partition(apart: list[list[bool]]) -> tuple[int, str, int] | None:
    """Return the width of tiles, their order and the number of splits; None if there are none.

    ``apart[j][i]`` is whether key i was added before the maximum at key j, or by another split.
    """
    n = len(apart)
    together = [[i == j or not (apart[j][i] or apart[i][j]) for i in range(n)] for j in range(n)]
    tiles = {tuple(i for i in range(n) if together[j][i]) for j in range(n)}
    ordered = sorted(tiles)
    widths = {len(tile) for tile in ordered[:-1]} or {n}
    if sum(map(len, ordered)) != n or len(widths) != 1 or len(ordered) < 2:
        return None
    (width,) = widths
    if width == 1:
        return None  # every weight differs from its rounding: P is not rounded at all
    # Tiles of one split are ordered: one of them comes first. Tiles of two splits are both first.
    heads = [tile[0] for tile in ordered]
    splits = [[heads[0]]]
    for head in heads[1:]:
        mine = next((x for x in splits if not (apart[x[0]][head] and apart[head][x[0]])), None)
        if mine is None:
            splits.append([head])
        else:
            mine.append(head)
    for x in splits:
        if any(apart[a][b] and apart[b][a] for a in x for b in x if a != b):
            return None
    ascending = all(apart[b][a] for x in splits for i, a in enumerate(x) for b in x[i + 1 :])
    descending = all(apart[a][b] for x in splits for i, a in enumerate(x) for b in x[i + 1 :])
    if max(map(len, splits)) == 1:
        order = "one tile a split"
    else:
        order = "ascending" if ascending else "descending" if descending else "another order"
    return width * _STEP, order, len(splits)


@experiment("rescaling")
def _rescaling(subject: Subject, which: Experiment) -> Observation:
    """Rows whose maximum rises by a given power of 2 from one tile to the next.

    Key 0 of the earlier tile has score 0, a key of the later tile a larger one. Their values cancel
    but for the roundings: of the weight of the later key, if the row is not rescaled. The numbers
    are the way of prescaling, the two keys and the rise in tenths.
    """
    way, early, late, tenths = (*which.numbers[:3], which.numbers[3])
    problem, name = which.problem, [*PRESCALES][way]
    dtype, s, M, N, D, Dv = (
        problem.dtype, problem.scale, problem.M, problem.N, problem.D, problem.Dv
    )  # fmt: skip
    rise = tenths / 10 * math.log(2)
    # Elements near the wished rise, of which the one is taken that rounding changes most.
    b = rounded(rise / s * (1 + torch.arange(-16, 17, dtype=torch.float64) / 4096), dtype).unique()
    x, clear = score(torch.ones_like(b), b, s, name, dtype)
    large = x.exp()
    error = ((rounded(large, dtype) - large) / large).abs() * (clear & clear_of_ties(large, dtype))
    at = int(error.argmax())
    b, large = b[at], large[at]
    small = 1 / large
    c = rounded(small, dtype)
    q = torch.zeros(1, 1, M, D, dtype=torch.float64)
    k = torch.zeros(1, 1, N, D, dtype=torch.float64)
    v = torch.zeros(1, 1, N, Dv, dtype=torch.float64)
    q[..., 0], q[..., 1] = 1, FAR
    k[..., 1] = -FAR * max(1.0, 2.0 ** math.ceil(math.log2(0.3 / s)))
    k[0, 0, early] = k[0, 0, late] = 0
    k[0, 0, late, 0] = b
    big = 2.0**10
    v[0, 0, early], v[0, 0, late] = big, -c * big
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v), backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[0, 0, -1, :1].double().cpu()
    cast = rounded(large, dtype)
    expected = {
        "rescaled": (small - c) / (1 + small) * big,
        "not rescaled": (1 - cast * c) / (1 + large) * big,
    }
    floor = FLOAT32 * small.item() * big + 2.0**-25
    tolerance = {x: abs(y) * UNIT[dtype] * 1.01 + floor for x, y in expected.items()}
    return Observation(got, {x: y.view(1) for x, y in expected.items()}, tolerance)


def _threshold(subject: Subject, problem: Problem, way: int, width: int, order: str) -> Answer:
    word = "rescale_threshold"
    early, late = (0, problem.N - 1) if order == "ascending" else (problem.N - 1, 0)
    del width
    states, last = [], None
    for power in range(1, MOST_PUT_OFF + 1):
        for tenths in (10 * power - 1, 10 * power + 1):
            which = Experiment("rescaling", problem, (way, early, late, tenths))
            fits = observe(subject, which).fits()
            states.append((tenths, fits[0] if len(fits) == 1 else ""))
            if states[-1][1] == "not rescaled":
                last = which
    clear = [(tenths, state) for tenths, state in states if state]
    put_off = [tenths for tenths, state in clear if state == "not rescaled"]
    at_once = [tenths for tenths, state in clear if state == "rescaled"]
    replay = (last or Experiment("rescaling", problem, (way, early, late, 9))).to_json()
    if not put_off and at_once and at_once[0] == states[0][0]:
        said = f"rescaled at rises of {_powers(at_once)}"
        return Answer(word, 0.0, "shown", said, replay)
    if put_off and at_once and max(put_off) < min(at_once) <= max(put_off) + 2:
        said = f"not rescaled up to 2**{max(put_off) / 10}, rescaled from 2**{min(at_once) / 10}"
        return Answer(word, round((max(put_off) + min(at_once)) / 20), "shown", said, replay)
    said = f"not rescaled at {_powers(put_off)}, rescaled at {_powers(at_once)}"
    return undecided(word, said, replay)


def _powers(tenths: list[int]) -> str:
    """Name the smallest and the largest rise, as powers of 2."""
    return f"2**{tenths[0] / 10} to 2**{tenths[-1] / 10}" if tenths else "no rise"
