"""Two runs that must agree: to the bit where that is promised, else both within the bound."""

from __future__ import annotations

import torch

from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.properties.comparison.compare import Finding, ratios, same_bits
from fa_verify.properties.execution.trial import Trial

__all__ = ["OF_KEYS", "OF_ROWS", "agree", "exact", "found_where", "within"]

OF_ROWS = ("out", "lse", "dq")
OF_KEYS = ("dk", "dv")


def within(
    trial: Trial,
    got: Outputs[torch.Tensor | None],
    limits: Outputs[torch.Tensor],
    guarantee: str,
    claim: str,
    compared: Outputs[torch.Tensor | None] | None = None,
) -> list[Finding]:
    """A finding for each output with an element further than ``limits`` from the oracle's."""
    of_outputs = []
    for place, name in enumerate(OUTPUTS):
        value, want, limit = got[place], trial.want[place], limits[place]
        if value is None:
            continue
        ratio = ratios(value, want, limit)
        bad = ratio > 1
        part = None if compared is None else compared[place]
        if part is not None:
            bad = bad & part
        of_outputs.append((name, value, want, limit, part, ratio, bad))
    # One answer from a GPU for all outputs.
    any_bad = torch.stack([bad.any() for *_, bad in of_outputs]).tolist() if of_outputs else []
    return [
        Finding.at(
            bad,
            ratio,
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
        for (name, value, want, limit, part, ratio, bad), found in zip(
            of_outputs, any_bad, strict=True
        )
        if found
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
    """A finding if bits differ anywhere in ``compared``, bool that expands to the output."""
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
    """A finding if anything is bad, at the element furthest from ``want``; NaN is furthest."""
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
) -> list[Finding]:
    """Findings where a second run of a trial's problem differs from the first.

    Of outputs that the subject promises to the bit, bits are compared; others differ where one of
    them, but not the other, leaves the bound around the oracle's result: what is wrong in both is
    accuracy's to report.

    Args:
        trial: The first run.
        again: The outputs of the second.
        guarantee: Such as "G8 layout"; its first word is looked up among the promises.
        claim: What was expected, a clause.
        rows: Bool (B,H,M): where out, lse and dq must agree; None is everywhere.
        keys: Bool (B, 1 or Hk, N): where dk and dv must; None is everywhere.
        only: The outputs to compare.
    """
    parts = [_part(rows if name in OF_ROWS else keys, name) for name in OUTPUTS]
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
    """Values of whichever run leaves the bound, and where not both do, out of a part."""
    first, want, bound = trial.got[place], trial.want[place], trial.judgement.bound[place]
    assert first is not None  # a subject returns lse, or has a backward pass, always or never
    was_outside = ratios(first, want, bound) > 1
    one = ~(was_outside & (ratios(second, want, bound) > 1))
    return torch.where(was_outside, first, second), one if part is None else one & part


def _part(where: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Rows or keys as a mask on an output: one axis more, but for lse."""
    return where if where is None or name == "lse" else where.unsqueeze(3)
