"""Narrow a given problem to what a subject's declarations leave."""

from __future__ import annotations

import dataclasses

from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject

__all__ = ["narrowed"]


def narrowed(subject: Subject, problem: Problem) -> Problem:
    """Return a problem with the mask, the scale and the sizes that some declarations leave.

    The declarations are ``always_causal``, ``fixed_scale``, ``one_query`` and ``m_gt_n``. Others
    may still exclude the problem. A problem that they allow is returned unchanged.
    """
    mask, M, N = problem.mask, problem.M, problem.N
    if subject.always_causal and not mask.causal:
        mask = dataclasses.replace(mask, causal=True, window_right=None)
    if subject.one_query:
        M, mask = 1, dataclasses.replace(mask, seqlens_q=None)
    if not subject.m_gt_n:
        N = max(M, N)
        rows, keys = mask.lengths(problem.B, M, N)
        if any(m > n for m, n in zip(rows, keys, strict=True)):
            keys = tuple(map(max, rows, keys))
            mask = dataclasses.replace(mask, seqlens_k=keys)
    scale = problem.sm_scale if subject.has_scale(problem) else subject.sm_scale
    return dataclasses.replace(problem, mask=mask, M=M, N=N, sm_scale=scale)
