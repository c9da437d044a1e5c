"""Families of the bias, each in several shapes; "none" stands for scores without one.

A name such as "normal/hn" says that heads and keys have elements of their own, and that batch
entries and rows share them; the rest of it is the family of the values.
"""

from __future__ import annotations

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem

__all__ = [
    "BIASES",
    "BIAS_DTYPES",
    "BIAS_FAMILIES",
    "BIAS_LAYOUTS",
    "NO_BIAS",
    "bias_shape",
    "bias_values",
]

NO_BIAS = "none"
# All axes first, then fewer of them, then none.
_AXES = ("bhmn", "hmn", "bmn", "mn", "bn", "hn", "m", "b", "")
_LARGE = 100.0
_CLOSED = -30_000.0  # of float16


def normal(draws: torch.Tensor, _uniform: torch.Tensor) -> torch.Tensor:
    """N(0, 1): a wrong entry, head, row or key, a sign or a scale."""
    return draws


def shifted(draws: torch.Tensor, _uniform: torch.Tensor) -> torch.Tensor:
    """N(100, 1), in float32: an offset of LSE that no weight tells of."""
    return draws + _LARGE


def needles(draws: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One element in eight is about 20, the others are 0: a pair off by one takes all weight."""
    return torch.where(uniform < 0.125, draws + 20.0, 0.0)


def closing(draws: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Every second element is -30,000, as masks are made of a bias: what is left of P is 0."""
    return torch.where(uniform < 0.5, _CLOSED, draws)


BIAS_FAMILIES = (normal, shifted, needles, closing)
_FAMILIES = {family.__name__: family for family in BIAS_FAMILIES}
# All names that problems can give.
BIASES = tuple(f"{family}/{axes}" for family in _FAMILIES for axes in _AXES)
# How a bias can lie in memory.
BIAS_LAYOUTS = ("bhsd", "transposed", "strided", "padded", "bshd")
# Of families that are not in the dtype of q.
BIAS_DTYPES = {"shifted": torch.float32}


def bias_shape(problem: Problem) -> tuple[int, ...]:
    """(B or 1, H or 1, M or 1, N or 1), by the axes in the name."""
    axes = problem.bias.partition("/")[2]
    sizes = zip("bhmn", (problem.B, problem.H, problem.M, problem.N), strict=True)
    return tuple(size if axis in axes else 1 for axis, size in sizes)


def bias_values(problem: Problem) -> torch.Tensor:
    """Float64 values in ``bias_shape``.

    Raises:
        ValueError: There is no such name.
    """
    if problem.bias not in BIASES:
        raise ValueError(f"bias is {problem.bias!r}; needs one of {BIASES}")
    family, shape = problem.bias.partition("/")[0], bias_shape(problem)
    # What all entries share is the first seed's: ``batched_problems`` makes none of it.
    seeds = problem.all_seeds if len(problem.all_seeds) == 1 or shape[0] > 1 else problem.seeds[:1]
    draws = stream.normal(seeds, "bias", shape, problem.device)
    return _FAMILIES[family](draws, stream.uniform(seeds, "bias/uniform", shape, problem.device))
