"""Families of the gradient of out. Each docstring names the faults that the family detects.

There is no family near the largest finite number. dP, delta, dS, dq and dk depend on dout and v
only through their products, so the inputs "near_max" make all of them as large. Only dv is not
covered; its sums have a wider accumulator.
"""

from __future__ import annotations

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.sampling import (
    FLOOR,
    drawn_normal,
    drawn_shape,
    filled,
    length_tensors,
    of_entries,
    places,
    random_bits,
)

__all__ = ["DOUT_FAMILIES"]

# Rows of a run with a gradient, or without one.
_RUNS = (1, 3, 16, 20, 40)
_TILE = 16  # rows of the lowest tile


def normal(problem: Problem) -> torch.Tensor:
    """N(0, 1): detects any fault of the backward."""
    return drawn_normal(problem, "dout")


def zero(problem: Problem) -> torch.Tensor:
    """All 0: detects gradients that do not depend on dout, such as unwritten memory."""
    return filled(problem, "dout", 0.0)


def constant(problem: Problem) -> torch.Tensor:
    """All 1, as in ``out.sum().backward()``: detects a wrong delta where dP hardly varies."""
    return filled(problem, "dout", 1.0)


def tiny(problem: Problem) -> torch.Tensor:
    """N(0, 1) times 2**-17, about 1e-5: dS and P' dout are in the underflow range of fp16."""
    return drawn_normal(problem, "dout", 2.0**-17)


def subnormal(problem: Problem) -> torch.Tensor:
    """Subnormal numbers: dv = P' dout is in the underflow range of its dtype."""
    return drawn_normal(problem, "dout", FLOOR[problem.dtype] * 2.0**-4)


def one_hot(problem: Problem) -> torch.Tensor:
    """One 1 in a valid row of each batch entry and head: dv is a row of P and shows the mask."""
    B, heads, M, Dv = drawn_shape(problem, "dout")
    rows, _ = length_tensors(problem)
    row = random_bits(problem, "one_hot/row", (B, heads)) % rows.clamp(min=1).view(B, 1)
    column = random_bits(problem, "one_hot/column", (B, heads)) % Dv
    is_row = places(problem, M).view(M, 1) == row.view(B, heads, 1, 1)
    is_column = places(problem, Dv) == column.view(B, heads, 1, 1)
    return (is_row & is_column).to(torch.float64)


def masked(problem: Problem) -> torch.Tensor:
    """N(0, 1) in every second run of rows, else 0: detects rows that a masked loss has and loses.

    A run has 1, 3, 16, 20 or 40 rows, chosen by the seed, which also chooses where the first ends.
    """
    seeds = problem.all_seeds
    lengths = of_entries(problem, [_RUNS[seed % len(_RUNS)] for seed in seeds])
    first = of_entries(problem, [seed // len(_RUNS) % (2 * max(_RUNS)) for seed in seeds])
    row = places(problem, problem.M).view(-1, 1)
    is_used = (row + first) // lengths % 2 == 0
    return torch.where(is_used, drawn_normal(problem, "dout"), 0.0)


def one_row_of_a_tile(problem: Problem) -> torch.Tensor:
    """N(0, 1) in one row of 16, else 0: detects tiles that are skipped by some of their rows."""
    row = of_entries(problem, [seed % _TILE for seed in problem.all_seeds])
    is_used = places(problem, problem.M).view(-1, 1) % _TILE == row
    return torch.where(is_used, drawn_normal(problem, "dout"), 0.0)


DOUT_FAMILIES = (normal, zero, constant, tiny, subnormal, one_hot, masked, one_row_of_a_tile)
