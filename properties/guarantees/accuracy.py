"""G1, G2 and T3: the accuracy of one run."""

from __future__ import annotations

from fa_verify.oracles.guarantee import G1, G2, T3
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.guarantees.agreement import found_where, within
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.running.trial import AttentionTrial

__all__ = ["accuracy", "finite", "logic"]

# T3: the allowed error in float64 arithmetic, in units of the sum of |terms|, and the largest
# |score| for which exp does not amplify the error of its argument beyond it.
LOGIC_SHARE = 1e-12
LOGIC_SCORE = 100.0
# The smallest normal float64: smaller terms have lost some or all digits.
LOGIC_UNDERFLOW = 2.0**-1022


def accuracy(trial: AttentionTrial) -> list[Finding]:
    """G1: every element of every output lies within the derived bound around the float64 oracle."""
    if trial.inside(*OUTPUTS):
        return []
    return within(trial, trial.got, trial.judgement.bound, G1, "leaves the derived bound")


def logic(trial: AttentionTrial) -> list[Finding]:
    """T3: in float64, every element is within 1e-12 times the sum of |terms|, if |s| <= 100."""
    if trial.problem.dtype != "fp64":
        trial.not_applicable(T3.key, f"without fp64: the problem is in {trial.problem.dtype}")
        return []
    if trial.judgement.max_score > LOGIC_SCORE:
        trial.not_applicable(T3.key, f"to scores above {LOGIC_SCORE:g}")
        return []
    trial.applies(T3.key)
    limits = Outputs(*(LOGIC_SHARE * terms + LOGIC_UNDERFLOW for terms in trial.judgement.terms))
    return within(trial, trial.got, limits, T3, "differs by more than rounding")


def finite(trial: AttentionTrial) -> list[Finding]:
    """G2: there is no NaN and no Inf, except lse = -inf on rows without a visible key."""
    findings: list[Finding] = []
    for name, got, want in zip(OUTPUTS, trial.got, trial.want, strict=True):
        if got is None:
            continue
        bad = ~got.isfinite() & want.isfinite()
        claim = "is NaN or infinite for finite inputs in range"
        findings += found_where(trial, name, bad, got, want, G2, claim)
    return findings
