"""Families of the bias, each in several shapes; "none" stands for a problem without a bias.

A name such as "normal/hn" consists of the family of the values and the axes along which they vary,
here heads and keys. The bias is broadcast along the other axes, here batch entries and rows. Each
docstring names the faults that the family detects.
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
    "grouped_biases",
]

NO_BIAS = "none"
# All axes first, then fewer of them, then none.
_AXES = ("bhmn", "hmn", "bmn", "mn", "bn", "hn", "m", "b", "")
_LARGE = 100.0
_CLOSED = -30_000.0  # representable in float16


def normal(draws: torch.Tensor, _uniform: torch.Tensor) -> torch.Tensor:
    """N(0, 1): detects a wrong batch entry, head, row, key, sign or scale."""
    return draws


def shifted(draws: torch.Tensor, _uniform: torch.Tensor) -> torch.Tensor:
    """N(100, 1) in float32: shifts LSE without changing the weights."""
    return draws + _LARGE


def needles(draws: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """About 20 in one of eight elements, else 0: a pair off by one takes all the weight."""
    return torch.where(uniform < 0.125, draws + 20.0, 0.0)


def closing(draws: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """-30,000 in half of the elements, as in masks that are passed as a bias: P is 0 there."""
    return torch.where(uniform < 0.5, _CLOSED, draws)


BIAS_FAMILIES = (normal, shifted, needles, closing)
_FAMILIES = {family.__name__: family for family in BIAS_FAMILIES}
# All values of ``Problem.bias`` other than "none".
BIASES = tuple(f"{family}/{axes}" for family in _FAMILIES for axes in _AXES)
# Storage layouts of a bias.
BIAS_LAYOUTS = ("bhsd", "transposed", "strided", "padded", "bshd")
# The dtypes of families that do not have the dtype of q.
BIAS_DTYPES = {"shifted": torch.float32}


def grouped_biases(*, shapes: int = len(_AXES)) -> tuple[tuple[str, ...], ...]:
    """Return ``BIASES`` in groups of one dtype, and of as many shapes, or fewer in the last."""
    groups: dict[tuple[object, int], list[str]] = {}
    for bias in BIASES:
        family, _, axes = bias.partition("/")
        place = _AXES.index(axes) // shapes
        groups.setdefault((BIAS_DTYPES.get(family), place), []).append(bias)
    return tuple(map(tuple, groups.values()))


def bias_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape (B or 1, H or 1, M or 1, N or 1), from the axes in the name."""
    axes = problem.bias.partition("/")[2]
    sizes = zip("bhmn", (problem.B, problem.H, problem.M, problem.N), strict=True)
    return tuple(size if axis in axes else 1 for axis, size in sizes)


def bias_values(problem: Problem) -> torch.Tensor:
    """Return float64 values of shape ``bias_shape``.

    Raises:
        ValueError: The problem's bias is not in ``BIASES``.
    """
    if problem.bias not in BIASES:
        raise ValueError(f"bias is {problem.bias!r}; needs one of {BIASES}")
    family, shape = problem.bias.partition("/")[0], bias_shape(problem)
    # A bias that batch entries share uses the first seed. ``batched_problems`` draws none of these.
    seeds = problem.all_seeds if len(problem.all_seeds) == 1 or shape[0] > 1 else problem.seeds[:1]
    draws = stream.normal(seeds, "bias", shape, problem.device)
    return _FAMILIES[family](draws, stream.uniform(seeds, "bias/uniform", shape, problem.device))
