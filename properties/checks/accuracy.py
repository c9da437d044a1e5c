"""G1, G2 and T3: how near to the truth, on one run."""

from __future__ import annotations

from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.comparison.agreement import found_where, within
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import Trial

__all__ = ["accuracy", "finite", "logic"]

# Rung T3: what float64 arithmetic may differ by, in units of the sum of |terms|, and the largest
# |score| up to which exp does not amplify the error of its argument beyond that.
LOGIC_SHARE = 1e-12
LOGIC_SCORE = 100.0
# Terms below the smallest normal number have lost digits, or all of them.
LOGIC_UNDERFLOW = 2.0**-1022


def accuracy(trial: Trial) -> list[Finding]:
    """G1: every element of every output lies within the derived bound of the float64 oracle."""
    return within(
        trial, trial.got, trial.judgement.bound, "G1 accuracy", "leaves the derived bound"
    )


def logic(trial: Trial) -> list[Finding]:
    """T3: in float64, every element within 1e-12 of the sum of |terms| where |s| <= 100."""
    if trial.problem.dtype != "fp64" or trial.judgement.max_score > LOGIC_SCORE:
        return []
    limits = Outputs(*(LOGIC_SHARE * terms + LOGIC_UNDERFLOW for terms in trial.judgement.terms))
    return within(trial, trial.got, limits, "T3 logic in float64", "differs by more than rounding")


def finite(trial: Trial) -> list[Finding]:
    """G2: no NaN and no Inf; lse is -inf on rows without a visible key, and only there."""
    findings: list[Finding] = []
    for name, got, want in zip(OUTPUTS, trial.got, trial.want, strict=True):
        if got is None:
            continue
        bad = ~got.isfinite() & want.isfinite()
        claim = "is NaN or infinite for finite inputs in range"
        findings += found_where(trial, name, bad, got, want, "G2 finite", claim)
    return findings
