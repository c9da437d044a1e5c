"""Compare a run with the oracle, or two runs with each other, bitwise or within the bound."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.comparison.compare import Finding, largest_ratios, ratios, same_bits
from fa_verify.properties.execution.trial import Trial

__all__ = ["OF_KEYS", "OF_ROWS", "agree", "exact", "found_where", "within"]

OF_ROWS = ("out", "lse", "dq")
OF_KEYS = ("dk", "dv")


@torch.inference_mode()
def within(
    trial: Trial,
    got: Outputs[torch.Tensor | None],
    limits: Outputs[torch.Tensor],
    guarantee: str,
    claim: str,
    compared: Outputs[torch.Tensor | None] | None = None,
) -> list[Finding]:
    """Return a finding for each output with an element further than its limit from the oracle's.

    Args:
        trial: The judged run.
        got: The outputs to compare; None is skipped.
        limits: Largest error of each element of each output, float64.
        guarantee: See ``Finding``.
        claim: See ``Finding``.
        compared: Bool, elements to compare; None compares all.
    """
    judged = []
    for place, name in enumerate(OUTPUTS):
        value, want, limit = got[place], trial.want[place], limits[place]
        if value is None:
            continue
        part = None if compared is None else compared[place]
        shown = value if part is None else torch.where(part, value, want)
        judged.append((name, value, want, limit, part, shown))
    largest = largest_ratios([(shown, want, limit) for _, _, want, limit, _, shown in judged])
    return [
        Finding.at(
            ratios(shown, want, limit) > 1,
            ratios(value, want, limit),
            guarantee=guarantee,
            claim=claim,
            subject=trial.subject,
            problem=trial.problem,
            output=name,
            got=value,
            want=want,
            bound=limit,
            compared=part,
        )
        for (name, value, want, limit, part, shown), (peak,) in zip(judged, largest, strict=True)
        if peak > 1
    ]


def exact(
    trial: Trial,
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    compared: torch.Tensor,
    guarantee: str,
    claim: str,
) -> list[Finding]:
    """Return a finding if ``got`` and ``want`` differ bitwise where ``compared`` is True.

    ``compared`` is a bool tensor that is expanded to the shape of the output.
    """
    compared = compared.expand_as(got)
    bad = compared & ~same_bits(got, want)
    return found_where(trial, name, bad, got, want, guarantee, claim, compared)


def found_where(
    trial: Trial,
    name: str,
    bad: torch.Tensor,
    got: torch.Tensor,
    want: torch.Tensor,
    guarantee: str,
    claim: str,
    compared: torch.Tensor | None = None,
) -> list[Finding]:
    """Return a finding at the bad element furthest from ``want``, if any; NaN is furthest."""
    if not bad.any():
        return []
    badness = (got.to(torch.float64) - want.to(torch.float64)).abs().nan_to_num(nan=torch.inf)
    return [
        Finding.at(
            bad,
            badness,
            guarantee=guarantee,
            claim=claim,
            subject=trial.subject,
            problem=trial.problem,
            output=name,
            got=got,
            want=want,
            compared=compared,
        )
    ]


def agree(
    trial: Trial,
    again: Outputs[torch.Tensor | None],
    guarantee: str,
    claim: str,
    *,
    rows: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    only: tuple[str, ...] = OUTPUTS,
    promised: Collection[str] | None = None,
) -> list[Finding]:
    """Return findings where a second run of a trial's problem differs from the first.

    Outputs that the subject promises bitwise are compared bitwise. Other outputs differ where
    exactly one of the two runs exceeds the bound around the oracle's result. An element that is
    wrong in both runs is reported by the accuracy check.

    Args:
        trial: The first run.
        again: The outputs of the second run.
        guarantee: The guarantee, such as "G8 layout".
        claim: Description of the fault, such as "differs from run to run".
        rows: Bool (B, H, M): where out, lse and dq must agree; None is everywhere.
        keys: Bool (B, 1 or Hk, N): where dk and dv must agree; None is everywhere.
        only: The outputs to compare.
        promised: The outputs that the subject promises bitwise; None looks up the first word of
            the guarantee.
    """
    parts = [_part(rows if name in OF_ROWS else keys, name) for name in OUTPUTS]
    if promised is None:
        promised = trial.subject.promises(guarantee.split()[0], trial.problem.config)
    findings = []
    either: list[torch.Tensor | None] = [None] * len(OUTPUTS)
    for place, (name, got, second) in enumerate(zip(OUTPUTS, trial.got, again, strict=True)):
        if got is None or second is None or name not in only:
            continue
        if name in promised:
            part = parts[place]
            everywhere = torch.ones((), dtype=torch.bool, device=got.device)
            compared = everywhere if part is None else part
            findings += exact(trial, name, second, got, compared, guarantee, claim)
        else:
            either[place], parts[place] = _outside_in_one(trial, place, second, parts[place])
    claim = f"{claim}, and leaves the bound"
    bound = trial.judgement.bound
    return findings + within(trial, Outputs(*either), bound, guarantee, claim, Outputs(*parts))


def _outside_in_one(
    trial: Trial, place: int, second: torch.Tensor, part: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values of the run that exceeds the bound, and where at most one of them does."""
    first, want, bound = trial.got[place], trial.want[place], trial.judgement.bound[place]
    assert first is not None  # a subject returns the same outputs in every run
    was_outside = ratios(first, want, bound) > 1
    one = ~(was_outside & (ratios(second, want, bound) > 1))
    return torch.where(was_outside, first, second), one if part is None else one & part


def _part(where: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Add an axis to a mask of rows or keys, except for lse, to broadcast it to an output."""
    return where if where is None or name == "lse" else where.unsqueeze(3)
