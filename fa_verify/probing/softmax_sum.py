"""The order of the softmax sum: whether it runs tile by tile.

The weight of key 0 is 1, and those of two further keys are 3/4 of half its last bit in float32.
Each alone is lost in the sum. Both together are not, if they are added to each other first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.experiments import Experiment, Observation, experiment, observe
from fa_verify.probing.rounding import tensors
from fa_verify.probing.trying import attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["order_of_softmax_sum"]

# Tiles are multiples of this width.
_STEP = 8
_SMALL = math.log(0.75 * 2.0**-24)
_NEVER = -300.0
# Fewer tiles beside the first one would not tell tiles from a tree of pairs.
_LEAST_TILES = 3


@experiment("softmax_order")
def _softmax_order(subject: Subject, which: Experiment) -> Observation:
    """Rows that each see key 0 and two multiples of 8; out is 1 / l in units of 2**-24 below 1."""
    problem = which.problem
    M, N, D, s = problem.M, problem.N, problem.D, problem.scale
    places = range(_STEP, N, _STEP)
    pairs = [*itertools.combinations(range(len(places)), 2)]
    problem = dataclasses.replace(problem, B=-(-len(pairs) // M))
    k = torch.zeros(1, 1, N, D, dtype=torch.float64)
    k[..., 1:, D - 1] = 1
    for column, place in enumerate(places):
        k[0, 0, place, D - 1] = 0
        k[0, 0, place, column] = 1
    rows = torch.full((problem.B * M, D), _NEVER / s, dtype=torch.float64)
    for row, pair in enumerate(pairs):
        rows[row, list(pair)] = _SMALL / s
    v = torch.zeros(1, 1, N, problem.Dv, dtype=torch.float64)
    v[0, 0, 0] = 1
    inputs = tensors(problem, q=rows.view(problem.B, 1, M, D), k=k, v=v)
    tried = attempt(subject, problem, inputs, backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[..., 0].double().cpu().flatten()[: len(pairs)]
    return Observation((1 - got) * 2.0**24, {}, {})


def order_of_softmax_sum(subject: Subject, problem: Problem) -> Answer:
    """Find out whether the softmax sum runs tile by tile.

    Args:
        subject: The kernel without its declarations.
        problem: An fp32 problem of 256 rows and keys, with D = 64.
    """
    word = "l_order"
    which = Experiment("softmax_order", problem)
    if problem.D * _STEP <= problem.N:
        return undecided(word, f"needs D > {problem.N // _STEP}")
    seen = observe(subject, which)
    if seen.got is None:
        return undecided(word, seen.error, which.to_json())
    if not bool(((seen.got == 0) | (seen.got == 2)).all()):
        said = f"out of some row is {seen.got.max():.4g} units below 1; needs 0 or 2"
        return undecided(word, said, which.to_json())
    places = range(_STEP, problem.N, _STEP)
    joined = {
        pair
        for pair, lost in zip(itertools.combinations(places, 2), seen.got.tolist(), strict=True)
        if lost
    }
    for width in (2 * _STEP, 4 * _STEP, 8 * _STEP):
        tiles = {(a, b) for a, b in itertools.combinations(places, 2) if a // width == b // width}
        beyond = {pair for pair in tiles if pair[0] >= width}
        enough = problem.N // width > _LEAST_TILES
        if enough and beyond <= joined <= tiles:
            said = f"each {width} keys are added to each other before others, in {problem.dtype}"
            return Answer(word, "tile", "shown", said, which.to_json())
    return undecided(
        word, "the sum runs in no order of tiles that begins at key 0", which.to_json()
    )
