"""The gradients of a bias and of sinks, outputs of problems that have these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fa_verify.oracles.bounds.bias import BiasBound, bias_error
from fa_verify.oracles.bounds.given_forward import Returned
from fa_verify.oracles.bounds.sinks import SinkBound, sink_error
from fa_verify.oracles.guarantee import BACKWARD, G1, G16, T3
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.accuracy import LOGIC_SCORE, LOGIC_SHARE, LOGIC_UNDERFLOW
from fa_verify.properties.guarantees.backward import OUTSIDE, forward_read
from fa_verify.properties.guarantees.compare import Finding, ratios
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.running.trial import (
    AttentionTrial,
    GradientRun,
    OutOfRangeError,
    run_gradient,
)

__all__ = ["bias_gradient", "judge_bias_gradient", "judge_sink_gradient", "sink_gradient"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def bias_gradient(trial: AttentionTrial) -> list[Finding]:
    """G1 and T3 of dbias: each element lies within the bound, and is 0 where no row sees it.

    Returns no findings if the problem has no bias or the subject no gradients. T3 applies to a
    float64 bias and scores up to ``LOGIC_SCORE``. dbias also lies within the bound given the
    forward, as the other gradients do; see ``backward``.

    Raises:
        SubjectError: The subject raises, or dbias has another shape or dtype than the bias.
    """
    problem, inputs, subject = trial.problem, trial.inputs, trial.subject
    if inputs.bias is None or not subject.backward:
        return []
    found: list[Finding] = []
    with suppress(OutOfRangeError):
        found = judge_bias_gradient(trial, lambda: run_gradient(subject, problem, inputs, "dbias"))
        pairs = problem.B * problem.H * problem.M * problem.N
        if not found and inputs.bias.numel() < pairs <= _MOST_PAIRS:
            # As an expanded tensor, whose elements share their memory and have a gradient each.
            bias = inputs.bias.expand(problem.B, problem.H, problem.M, problem.N)
            whole = inputs._replace(bias=bias)
            found = judge_bias_gradient(
                dataclasses.replace(trial, inputs=whole),
                lambda: run_gradient(subject, problem, whole, "dbias"),
            )
    return found


def sink_gradient(trial: AttentionTrial) -> list[Finding]:
    """G1 of dsinks: each element lies within the bound, and within that given the forward.

    Returns no findings if the problem has no sinks or no keys, or the subject no gradients.

    Raises:
        SubjectError: The subject raises, or dsinks has another shape or dtype than the sinks.
    """
    problem, inputs, subject = trial.problem, trial.inputs, trial.subject
    if inputs.sinks is None or not subject.backward or problem.N == 0:
        return []
    run = run_gradient(subject, problem, inputs, "dsinks")
    return judge_sink_gradient(trial, lambda: run) or _changed_later(trial, run.gradient)


def judge_bias_gradient(trial: AttentionTrial, run: Callable[[], GradientRun]) -> list[Finding]:
    """Return the findings of ``bias_gradient`` on a gradient.

    Args:
        trial: A run of a problem with a bias.
        run: Returns the gradient, and the results of the forward. It is called if the gradient is
            in range.

    Raises:
        OutOfRangeError: A correct kernel may fail.
    """
    bias = trial.inputs.bias
    assert bias is not None
    of_bias = {**_options(trial), "bias_dtype": _NAMES[bias.dtype]}

    def judged(given: Returned | None) -> BiasBound:
        return bias_error(*trial.inputs, **of_bias, given=given)  # type: ignore[arg-type]

    exact = judged(None)
    if exact.out_of_range is not None:
        raise OutOfRangeError(exact.out_of_range)
    want = torch_reference.bias_gradient(*trial.inputs, **_scores(trial))  # type: ignore[arg-type]
    out, lse, got = run()
    found = _beyond(trial, "dbias", got, want, exact.bound, G1, _LEAVES)
    is_sharp = bias.dtype == torch.float64 and trial.judgement.max_score <= LOGIC_SCORE
    if not found and is_sharp:
        limit = LOGIC_SHARE * exact.terms + LOGIC_UNDERFLOW
        claim = "differs by more than rounding"
        found = _beyond(trial, "dbias", got, want, limit, T3, claim)
    return found or _outside(trial, "dbias", got, judged, out, lse)


def judge_sink_gradient(trial: AttentionTrial, run: Callable[[], GradientRun]) -> list[Finding]:
    """Return the findings of ``sink_gradient`` on a gradient.

    Args:
        trial: A run of a problem with sinks and keys.
        run: Returns the gradient, and the results of the forward.
    """

    def judged(given: Returned | None) -> SinkBound:
        return sink_error(*trial.inputs, **_options(trial), given=given)  # type: ignore[arg-type]

    want = torch_reference.sink_gradient(*trial.inputs, **_scores(trial))  # type: ignore[arg-type]
    out, lse, got = run()
    found = _beyond(trial, "dsinks", got, want, judged(None).bound, G1, _LEAVES)
    return found or _outside(trial, "dsinks", got, judged, out, lse)


_LEAVES = "leaves the derived bound"
# Pairs of a row and a key of which each has an element of dbias.
_MOST_PAIRS = 2**18


def _changed_later(trial: AttentionTrial, got: torch.Tensor) -> list[Finding]:
    """G16: dsinks stays as it is in the next backward, whose gradient may be added to it."""
    kept, other = got.clone(), trial.inputs._replace(dout=-trial.inputs.dout / 2)
    run_gradient(trial.subject, trial.problem, other, "dsinks")
    claim = "changes in the backward of the next call"
    return _beyond(trial, "dsinks", got, kept, torch.zeros_like(kept), G16.key, claim)


def _scores(trial: AttentionTrial) -> dict[str, Any]:
    problem = trial.problem
    return {"mask": problem.mask, "sm_scale": problem.scale, "softcap": problem.softcap}


def _options(trial: AttentionTrial) -> dict[str, Any]:
    numerics = trial.subject.numerics_of(trial.problem)
    return {**_scores(trial), "in_dtype": trial.problem.dtype, "numerics": numerics}


def _outside(
    trial: AttentionTrial,
    output: str,
    got: torch.Tensor,
    judged: Callable[[Returned | None], BiasBound | SinkBound],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> list[Finding]:
    """Return the finding of a gradient outside of its bound given the forward."""
    # The gradient may come from another run.
    run = dataclasses.replace(trial, got=Outputs(out, lse, None, None, None))
    read = forward_read(run)
    if read is None:
        return []
    want, bound = judged(read)[:2]
    claim = OUTSIDE.format("its forward's results as returned")
    return _beyond(trial, output, got, want, bound, BACKWARD, claim)


def _beyond(
    trial: AttentionTrial,
    output: str,
    got: torch.Tensor,
    want: torch.Tensor,
    limit: torch.Tensor,
    guarantee: str,
    claim: str,
) -> list[Finding]:
    """Return a finding if an element is NaN or further than ``limit`` from ``want``."""
    if output == "dsinks":
        got, want, limit = (x.view(1, -1, 1) for x in (got, want, limit))
    ratio = ratios(got, want, limit)
    bad = ratio > 1
    if not bool(bad.any()):
        return []
    return [
        Finding.at(
            bad, ratio, guarantee=guarantee, claim=claim, subject=trial.subject,
            problem=trial.problem, output=output, got=got, want=want, bound=limit,
        )
    ]  # fmt: skip
