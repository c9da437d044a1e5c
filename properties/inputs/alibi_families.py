"""Families of ALiBi slopes; "none" stands for a problem without ALiBi.

Each docstring names the faults that the family detects.
"""

from __future__ import annotations

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem

__all__ = ["ALIBI_FAMILIES", "NO_ALIBI"]

NO_ALIBI = "none"


def halving(problem: Problem) -> torch.Tensor:
    """(H,), 1/2 for the first head, halved for each next head: detects a wrong head.

    Source: Press, Smith, Lewis 2022 (arXiv:2108.12409), for eight heads.
    """
    slopes = [2.0 ** -(h % 16 + 1) for h in range(problem.H)]
    return torch.tensor(slopes, dtype=torch.float64, device=problem.device)


def normal(problem: Problem) -> torch.Tensor:
    """(B, H), N(0, 1): detects a wrong batch entry. Negative slopes favour distant keys."""
    return stream.normal(problem.all_seeds, "alibi", (problem.B, problem.H), problem.device)


def none_at_all(problem: Problem) -> torch.Tensor:
    """(H,), all 0: the scores are the same as without ALiBi."""
    return torch.zeros(problem.H, dtype=torch.float64, device=problem.device)


def steep(problem: Problem) -> torch.Tensor:
    """(B, H), N(0, 2**10): a few keys have all the weight; distant ones shift LSE far."""
    return normal(problem) * 32.0


ALIBI_FAMILIES = (halving, normal, none_at_all, steep)
