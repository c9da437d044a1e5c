"""Families of sinks; "none" stands for a problem without sinks.

Each docstring names the faults that the family detects.
"""

from __future__ import annotations

import math

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem

__all__ = ["NO_SINKS", "SINK_FAMILIES"]

NO_SINKS = "none"
# Beyond the scores of all input families but the extreme ones, and within the range of lse.
_HUGE = 2.0**13
# exp(-12) of the weight is left for the keys.
_ABOVE = 12.0


def ordinary(problem: Problem) -> torch.Tensor:
    """N(0, 1): detects a sink that is left out, scaled, or taken from another head."""
    return stream.normal(problem.all_seeds[:1], "sinks", (1, problem.H), problem.device)[0]


def huge(problem: Problem) -> torch.Tensor:
    """2**13 and -2**13 in turn: a sink that has all the weight, or none; detects overflow."""
    signs = [1.0 - 2 * ((h + problem.all_seeds[0]) % 2) for h in range(problem.H)]
    return _HUGE * torch.tensor(signs, dtype=torch.float64, device=problem.device)


def absent(problem: Problem) -> torch.Tensor:
    """-inf, which is no sink: detects NaN from -inf - -inf."""
    return torch.full((problem.H,), -math.inf, dtype=torch.float64, device=problem.device)


def some_absent(problem: Problem) -> torch.Tensor:
    """-inf in every second head, N(0, 1) in the others: detects a state kept from head to head."""
    sinks = ordinary(problem)
    sinks[problem.all_seeds[0] % 2 :: 2] = -math.inf
    return sinks


def dominant(problem: Problem) -> torch.Tensor:
    """N(0, 1), and 12 in one head: the keys of that head have little weight."""
    sinks = ordinary(problem)
    sinks[problem.all_seeds[0] % problem.H] = _ABOVE
    return sinks


SINK_FAMILIES = (ordinary, huge, absent, some_absent, dominant)
