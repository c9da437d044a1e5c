"""Compare a run with the oracle, or two runs with each other, bitwise or within the bound."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fa_verify.oracles.guarantee import guarantee_of
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.guarantees.compare import Finding, largest_ratios, ratios, same_bits
from fa_verify.properties.running.trial import AttentionTrial, Judged, Trial

__all__ = [
    "OF_KEYS", "OF_ROWS", "agree", "exact", "found_where", "outside", "same_or_inside", "within"
]  # fmt: skip

OF_ROWS = ("out", "lse", "dq")
OF_KEYS = ("dk", "dv")


def within(
    trial: AttentionTrial,
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
    judged = {
        name: Judged(value, want, limit)
        for name, value, want, limit in zip(OUTPUTS, got, trial.want, limits, strict=True)
        if value is not None
    }
    parts = {} if compared is None else dict(zip(OUTPUTS, compared, strict=True))
    return outside(trial, judged, guarantee, claim, parts)


@torch.inference_mode()
def outside(
    trial: Trial,
    judged: Mapping[str, Judged],
    guarantee: str,
    claim: str,
    compared: Mapping[str, torch.Tensor | None] | None = None,
) -> list[Finding]:
    """Return a finding for each output with an element outside of its bound.

    Args:
        trial: A run on the call.
        judged: The outputs to judge, by name.
        guarantee: See ``Finding``.
        claim: See ``Finding``.
        compared: Bool, elements to compare; all of an output that it lacks.
    """
    parts = {name: (compared or {}).get(name) for name in judged}
    shown = {name: _shown(x, parts[name]) for name, x in judged.items()}
    largest = largest_ratios([*shown.values()])
    return [
        Finding.at(
            ratios(*shown[name]) > 1,
            ratios(*x),
            guarantee=guarantee,
            claim=claim,
            subject=trial.subject,
            problem=trial.problem,
            output=name,
            got=x.got,
            want=x.want,
            bound=x.bound,
            compared=parts[name],
        )
        for (name, x), (peak,) in zip(judged.items(), largest, strict=True)
        if peak > 1
    ]


def _shown(judged: Judged, compared: torch.Tensor | None) -> Judged:
    """Return an output with the true values in place of the elements that are not compared."""
    if compared is None:
        return judged
    return judged._replace(got=torch.where(compared, judged.got, judged.want))


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
    trial: AttentionTrial,
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
    where = {name: _part(rows if name in OF_ROWS else keys, name) for name in OUTPUTS}
    second = {name: x for name, x in zip(OUTPUTS, again, strict=True) if x is not None}
    again_only = {name: x for name, x in second.items() if name in only}
    return same_or_inside(trial, again_only, guarantee, claim, where=where, promised=promised)


def same_or_inside(
    trial: Trial,
    again: Mapping[str, torch.Tensor],
    guarantee: str,
    claim: str,
    *,
    where: Mapping[str, torch.Tensor | None] | None = None,
    promised: Collection[str] | None = None,
) -> list[Finding]:
    """Return findings where a second run of a call differs from the first; see ``agree``.

    Args:
        trial: The first run.
        again: Outputs of the second run, by name. Those that the first did not return are skipped.
        guarantee: See ``agree``.
        claim: See ``agree``.
        where: Bool, where the runs must agree; everywhere in an output that it lacks.
        promised: See ``agree``.
    """
    if promised is None:
        promised = trial.subject.promises(guarantee_of(guarantee), trial.problem.config)
    findings: list[Finding] = []
    either: dict[str, Judged] = {}
    parts: dict[str, torch.Tensor | None] = {}
    for name, (got, want, bound) in trial.outputs.items():
        if name not in again:
            continue
        second, part = again[name], (where or {}).get(name)
        if name in promised:
            compared = torch.ones((), dtype=torch.bool, device=got.device) if part is None else part
            findings += exact(trial, name, second, got, compared, guarantee, claim)
            continue
        # The values of the run that exceeds the bound, where at most one of them does.
        was_outside = ratios(got, want, bound) > 1
        one = ~(was_outside & (ratios(second, want, bound) > 1))
        either[name] = Judged(torch.where(was_outside, got, second), want, bound)
        parts[name] = one if part is None else one & part
    return findings + outside(trial, either, guarantee, f"{claim}, and leaves the bound", parts)


def _part(where: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Add an axis to a mask of rows or keys, except for lse, to broadcast it to an output."""
    return where if where is None or name == "lse" else where.unsqueeze(3)
