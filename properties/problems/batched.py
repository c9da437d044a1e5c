"""Batched problems: many problems of one shape, concatenated along the batch and judged together.

On a GPU, a small problem takes less time than its launches and the many launches of the oracle. A
batch of 64 problems costs little more than one problem.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.problems.drawn_masks import chosen_lengths
from fa_verify.properties.problems.seqlens import Draw

__all__ = ["LARGEST", "batched_problems"]

LARGEST = 64


@st.composite
def batched_problems(
    draw: Draw,
    problems: st.SearchStrategy[Problem],
    *,
    tile: int,
    max_cost: int,
    m_gt_n: bool = True,
) -> Problem:
    """Strategy for batches of up to 64 problems that differ in values and sequence lengths.

    The first problem is drawn. The seeds and lengths of the others are derived from its seed.
    Shrinks towards the first problem alone. Some problems are not batched: those without elements,
    with a mask that depends on the batch entry, with a bias that batch entries share, or with
    sinks, which they always share.

    Args:
        draw: Argument of the composite strategy.
        problems: Strategy for the first problem.
        tile: Rows and keys of a tile, the unit of the cost as in ``strategies.problems``.
        max_cost: Largest cost of the batch.
        m_gt_n: Whether a sequence may have more rows than keys.
    """
    first: Problem = draw(problems)
    most = min(LARGEST, max_cost // max(1, _cost(first, tile)))
    shares = first.bias != NO_BIAS and "b" not in first.bias.partition("/")[2]
    shares |= first.sinks != NO_SINKS
    if most < 2 or shares or not first.mask.uniform or 0 in (first.B, first.M, first.N):
        return first
    count = draw(st.sampled_from((1, 2, *(most,) * 14)))
    return first if count == 1 else _batched(first, count, m_gt_n)


def _cost(problem: Problem, tile: int) -> int:
    """Return the number of pairs of tiles of a problem."""
    return problem.B * problem.H * -(-problem.M // tile) * -(-problem.N // tile)


def _batched(first: Problem, count: int, m_gt_n: bool) -> Problem:
    """Return a batch of ``count`` problems that begins with the first."""
    further = stream.integers(first.seed, "stack/seeds", (count - 1,))
    seeds = (first.seed, *(x & 2**31 - 1 for x in further.tolist()))
    rows = _lengths(first, count, "stack/seqlens_q", first.mask.seqlens_q, first.M)
    keys = _lengths(first, count, "stack/seqlens_k", first.mask.seqlens_k, first.N)
    if keys is not None and not m_gt_n:
        keys = tuple(map(max, keys, rows or (first.M,) * len(keys)))
    mask = dataclasses.replace(first.mask, seqlens_q=rows, seqlens_k=keys)
    return dataclasses.replace(first, B=count * first.B, mask=mask, seed=0, seeds=seeds)


def _lengths(
    first: Problem, count: int, name: str, given: tuple[int, ...] | None, size: int
) -> tuple[int, ...] | None:
    """Return the lengths of a batched problem, starting with those of the first problem."""
    if given is None:
        return None
    words = stream.integers(first.seed, name, (count - 1, 2)) & 2**62 - 1
    drawn = [
        chosen_lengths(size, even % (size + 1), code, first.B) for even, code in words.tolist()
    ]
    return (*given, *(length for lengths in drawn for length in lengths))
