"""Batched problems: many of one shape, one behind the other along the batch, judged together.

A small problem keeps a GPU busy for less time than its launches take, and the oracle's are many: a
batch of 64 costs little more than one of them.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.problems.drawn_masks import chosen_lengths
from fa_verify.properties.problems.seqlens import Draw

__all__ = ["LARGEST", "batched_problems"]

LARGEST = 64


@st.composite
def batched_problems(
    draw: Draw, problems: st.SearchStrategy[Problem], *, tile: int, max_cost: int
) -> Problem:
    """Batches of up to 64 problems that differ in their values, and in lengths if they have some.

    The first is drawn; what the others have of their own is a function of its seed. Shrinks
    towards the first alone. Problems without elements, those of a mask that asks which batch entry
    it is in, and those of a bias that batch entries share, stay alone.

    Args:
        draw: Of the composite strategy.
        problems: Of the first.
        tile: Rows and keys of a tile; cost is counted in them, as by ``strategies.problems``.
        max_cost: Of all of them.
    """
    first: Problem = draw(problems)
    most = min(LARGEST, max_cost // max(1, _cost(first, tile)))
    shares = first.bias != NO_BIAS and "b" not in first.bias.partition("/")[2]
    if most < 2 or shares or not first.mask.uniform or 0 in (first.B, first.M, first.N):
        return first
    count = draw(st.sampled_from((1, 2, *(most,) * 14)))
    return first if count == 1 else _batched(first, count)


def _cost(problem: Problem, tile: int) -> int:
    """Pairs of tiles of a problem."""
    return problem.B * problem.H * -(-problem.M // tile) * -(-problem.N // tile)


def _batched(first: Problem, count: int) -> Problem:
    """The first of so many problems with the others behind it."""
    further = stream.integers(first.seed, "stack/seeds", (count - 1,))
    seeds = (first.seed, *(x & 2**31 - 1 for x in further.tolist()))
    mask = dataclasses.replace(
        first.mask,
        seqlens_q=_lengths(first, count, "stack/seqlens_q", first.mask.seqlens_q, first.M),
        seqlens_k=_lengths(first, count, "stack/seqlens_k", first.mask.seqlens_k, first.N),
    )
    return dataclasses.replace(first, B=count * first.B, mask=mask, seed=0, seeds=seeds)


def _lengths(
    first: Problem, count: int, name: str, given: tuple[int, ...] | None, size: int
) -> tuple[int, ...] | None:
    """The lengths of a batched problem, of which those of the first are given."""
    if given is None:
        return None
    words = stream.integers(first.seed, name, (count - 1, 2)) & 2**62 - 1
    drawn = [
        chosen_lengths(size, even % (size + 1), code, first.B) for even, code in words.tolist()
    ]
    return (*given, *(length for lengths in drawn for length in lengths))
