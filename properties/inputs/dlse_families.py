"""Families of the gradient of lse; "none" stands for a loss that does not depend on lse.

Each docstring names the faults that the family detects.
"""

from __future__ import annotations

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.sampling import drawn_shape

__all__ = ["DLSE_FAMILIES", "NO_DLSE"]

NO_DLSE = "none"


def _shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape in which values are drawn, (B, heads, M), with the heads of dout."""
    return drawn_shape(problem, "dout")[:3]


def _drawn_normal(problem: Problem) -> torch.Tensor:
    return stream.normal(problem.all_seeds, "dlse", _shape(problem), problem.device)


def normal(problem: Problem) -> torch.Tensor:
    """N(0, 1): detects a gradient of lse that is ignored or has a wrong sign, row or head."""
    return _drawn_normal(problem)


def constant(problem: Problem) -> torch.Tensor:
    """All 1, as in ``lse.sum().backward()``."""
    return torch.ones(_shape(problem), dtype=torch.float64, device=problem.device)


def large(problem: Problem) -> torch.Tensor:
    """N(0, 2**12): the rest of delta is small and is lost if delta is rounded to 16 bits."""
    return _drawn_normal(problem) * 64.0


DLSE_FAMILIES = (normal, constant, large)
