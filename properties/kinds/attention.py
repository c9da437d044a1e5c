"""Attention to padded tensors, forward and backward."""

from __future__ import annotations

from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import problems_of
from fa_verify.properties.kinds.features import features_of, holds, without
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.kinds.reductions import complexity, reductions
from fa_verify.properties.running.trial import run_trial

__all__ = ["ATTENTION"]

ATTENTION = Kind(
    problems_of, Subject.excludes, run_trial, reductions, complexity, features_of, holds, without
)
