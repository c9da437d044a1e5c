"""Attention to padded tensors, forward and backward."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.problem import Problem
from fa_verify.properties.execution.trial import run_trial
from fa_verify.properties.kinds.features import features_of, holds, without
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.kinds.reductions import complexity, reductions
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import problems_of

__all__ = ["ATTENTION"]


def _draw(subject: Subject, **wanted: Any) -> st.SearchStrategy[Problem]:
    """Return problems that a kernel supports; see ``problems_of``."""
    return problems_of(subject, **wanted)


def _excludes(subject: Subject, problem: Problem) -> str | None:
    """Return the declaration that excludes a problem, as a sentence; None if none does."""
    return subject.excludes(problem)


ATTENTION = Kind(_draw, _excludes, run_trial, reductions, complexity, features_of, holds, without)
