"""The backward given the forward's results: the accuracy of gradients on what the backward read."""

from __future__ import annotations

import dataclasses

from fa_verify.oracles.bounds.given_forward import Gradients, Returned, given_forward, returned
from fa_verify.oracles.guarantee import BACKWARD
from fa_verify.oracles.outputs import Outputs
from fa_verify.properties.guarantees.agreement import within
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.running.ratios import are_finite
from fa_verify.properties.running.trial import AttentionTrial

__all__ = [
    "OUTSIDE",
    "backward",
    "forward_read",
    "gradients_of",
    "outside",
]

OUTSIDE = "leaves the bound of a backward that reads {}; else declare backward_reads"


def backward(trial: AttentionTrial) -> list[Finding]:
    """dq, dk and dv lie within the bound of a backward that reads out and lse as returned.

    The gradients are compared with those that follow in float64 from the subject's own out and
    lse, which ``backward_reads`` declares to be read. Applies if out and lse lie within their own
    bounds. Otherwise G1 fails.

    Raises:
        RuntimeError: A bound is not finite, an error of the suite.
    """
    found = gradients_of(trial)
    return [] if found is None else outside(trial, found)


def gradients_of(trial: AttentionTrial) -> Gradients | None:
    """Return the gradients given the forward; None if they are not judged.

    Raises:
        RuntimeError: A bound is not finite, an error of the suite.
    """
    problem, numerics = trial.problem, trial.subject.numerics_of(trial.problem)
    given = forward_read(trial)
    if given is None or not trial.subject.backward:
        return None
    found = given_forward(
        *trial.inputs, given=given, mask=problem.mask, sm_scale=problem.scale,
        in_dtype=problem.dtype, numerics=numerics, softcap=problem.softcap,
    )  # fmt: skip
    if not are_finite(*found[3:]):
        raise RuntimeError(f"the bound given the forward is not finite: {problem.to_json()}")
    return found


def outside(trial: AttentionTrial, found: Gradients) -> list[Finding]:
    """Return the findings of ``backward``, around the gradients given the forward."""
    got = trial.got
    want = trial.want._replace(dq=found.dq, dk=found.dk, dv=found.dv)
    limits = trial.judgement.bound._replace(dq=found.dq_bound, dk=found.dk_bound, dv=found.dv_bound)
    gradients = Outputs(None, None, got.dq, got.dk, got.dv)
    judged = dataclasses.replace(trial, want=want)
    return within(judged, gradients, limits, BACKWARD, OUTSIDE.format(_named(trial)))


def forward_read(trial: AttentionTrial) -> Returned | None:
    """Return the outputs that the backward reads; None if none, or if one leaves its bound."""
    assert trial.got.out is not None  # every subject returns it
    given = returned(trial.got.out, trial.got.lse, trial.subject.numerics_of(trial.problem))
    if given == (None, None) or not trial.inside("out", "lse"):
        return None
    return given


def _named(trial: AttentionTrial) -> str:
    assert trial.got.out is not None
    given = returned(trial.got.out, trial.got.lse, trial.subject.numerics_of(trial.problem))
    names = [name for name, x in given._asdict().items() if x is not None]
    return f"{' and '.join(names)} as returned"
