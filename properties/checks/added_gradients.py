"""The gradient of a bias, the sixth output of problems that have a bias."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fa_verify.oracles.bounds.bias import bias_error
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.checks.accuracy import LOGIC_SCORE, LOGIC_SHARE, LOGIC_UNDERFLOW
from fa_verify.properties.checks.backward import GIVEN_FORWARD, OUTSIDE, forward_read
from fa_verify.properties.comparison.compare import Finding, ratios
from fa_verify.properties.execution.trial import (
    BiasRun,
    OutOfRangeError,
    Trial,
    run_bias_gradient,
)
from fa_verify.properties.inputs.families import TORCH_DTYPES

__all__ = ["bias_gradient", "judge_bias_gradient"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def bias_gradient(trial: Trial) -> list[Finding]:
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
    with suppress(OutOfRangeError):
        return judge_bias_gradient(trial, lambda: run_bias_gradient(subject, problem, inputs))
    return []


def judge_bias_gradient(trial: Trial, run: Callable[[], BiasRun]) -> list[Finding]:
    """Return the findings of ``bias_gradient`` on a gradient.

    Args:
        trial: A run of a problem with a bias.
        run: Returns the gradient, and the results of the forward. It is called if the gradient is
            in range.

    Raises:
        OutOfRangeError: A correct kernel may fail.
    """
    problem, inputs, subject = trial.problem, trial.inputs, trial.subject
    q, k, v, dout, dlse, slopes, bias = inputs
    assert bias is not None
    given = (q, k, v, dout, dlse, slopes, bias)
    options: dict[str, Any] = {
        "mask": problem.mask, "sm_scale": problem.scale, "softcap": problem.softcap,
        "in_dtype": problem.dtype, "bias_dtype": _NAMES[bias.dtype],
        "numerics": subject.numerics_of(problem),
    }  # fmt: skip
    judged = bias_error(*given, **options)
    if judged.out_of_range is not None:
        raise OutOfRangeError(judged.out_of_range)
    want = torch_reference.bias_gradient(
        *given, mask=problem.mask, sm_scale=problem.scale, softcap=problem.softcap
    )
    out, lse, got = run()
    found = _beyond(trial, got, want, judged.bound, "G1 accuracy", "leaves the derived bound")
    is_sharp = bias.dtype == torch.float64 and trial.judgement.max_score <= LOGIC_SCORE
    if not found and is_sharp:
        limit = LOGIC_SHARE * judged.terms + LOGIC_UNDERFLOW
        claim = "differs by more than rounding"
        found = _beyond(trial, got, want, limit, "T3 logic in float64", claim)
    read = forward_read(trial, out, lse)
    if not found and read is not None:
        judged = bias_error(*given, **options, given=read)
        claim = OUTSIDE.format("its forward's results as returned")
        found = _beyond(trial, got, judged.dbias, judged.bound, GIVEN_FORWARD, claim)
    return found


def _beyond(
    trial: Trial,
    got: torch.Tensor,
    want: torch.Tensor,
    limit: torch.Tensor,
    guarantee: str,
    claim: str,
) -> list[Finding]:
    """Return a finding if an element is NaN or further than ``limit`` from ``want``."""
    ratio = ratios(got, want, limit)
    bad = ratio > 1
    if not bool(bad.any()):
        return []
    return [
        Finding.at(
            bad, ratio, guarantee=guarantee, claim=claim, subject=trial.subject,
            problem=trial.problem, output="dbias", got=got, want=want, bound=limit,
        )
    ]  # fmt: skip
