"""The guarantees of a correct kernel, each a function from a trial to its findings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oracles import stream
from oracles.outputs import OUTPUTS, Outputs
from oracles.problem import Problem
from properties.compare import Finding, ratios, same_bits
from properties.families import length_tensors
from properties.tensors import Inputs, make
from properties.trial import Trial, run_subject

__all__ = [
    "GUARANTEES",
    "accuracy",
    "dirty_padding",
    "empty_rows",
    "finite",
    "hidden_positions",
    "logic",
]

# Rung T3: what float64 arithmetic may differ by, in units of the sum of |terms|, and the largest
# |score| up to which exp does not amplify the error of its argument beyond that.
LOGIC_SHARE = 1e-12
LOGIC_SCORE = 100.0
# Terms below the smallest normal number have lost digits, or all of them.
LOGIC_UNDERFLOW = 2.0**-1022

_OF_ROWS = ("out", "lse", "dq")
_OF_KEYS = ("dk", "dv")


def accuracy(trial: Trial) -> list[Finding]:
    """G1: every element of every output lies within the derived bound of the float64 oracle."""
    return _beyond(trial, trial.judgement.bound, "G1 accuracy", "leaves the derived bound")


def logic(trial: Trial) -> list[Finding]:
    """T3: in float64, every element within 1e-12 of the sum of |terms| where |s| <= 100."""
    if trial.problem.dtype != "fp64" or trial.judgement.max_score > LOGIC_SCORE:
        return []
    limits = Outputs(*(LOGIC_SHARE * terms + LOGIC_UNDERFLOW for terms in trial.judgement.terms))
    return _beyond(trial, limits, "T3 logic in float64", "differs by more than rounding")


def finite(trial: Trial) -> list[Finding]:
    """G2: no NaN and no Inf; lse is -inf on rows without a visible key, and only there."""
    findings = []
    for name, got, want, _ in _judged(trial, trial.want):
        bad = ~got.isfinite() & want.isfinite()
        if bad.any():
            findings.append(
                Finding.at(
                    bad,
                    bad,
                    guarantee="G2 finite",
                    claim="is NaN or infinite for finite inputs in range",
                    subject=trial.subject,
                    problem=trial.problem,
                    output=name,
                    got=got,
                    want=want,
                )
            )
    return findings


def empty_rows(trial: Trial) -> list[Finding]:
    """G3: rows without a visible key give out = 0, lse = -inf, dq = 0, and add nothing to dk, dv.

    Their dout is ignored: a second run with NaN in it gives the same bits everywhere.
    """
    problem = trial.problem
    empty = ~_seen(problem).any(3)
    findings = []
    for name, got, want, _ in _judged(trial, trial.want):
        if name in _OF_ROWS:
            rows = empty if name == "lse" else empty.unsqueeze(3)
            findings += _differ(
                trial, name, got, want.to(got.dtype), rows.expand_as(got),
                "G3 empty rows", "is not exact on a row without a visible key",
            )  # fmt: skip
    if not empty.any():
        return findings
    poisoned = torch.where(empty.unsqueeze(3), torch.nan, trial.inputs.dout)
    again = run_subject(trial.subject, problem, trial.inputs._replace(dout=poisoned))
    return findings + _same(
        trial, again, "G3 empty rows", "depends on dout of a row without a visible key"
    )


def dirty_padding(trial: Trial) -> list[Finding]:
    """G4: whatever stands in padding changes no bit elsewhere, and its gradient is exactly 0."""
    problem = trial.problem
    rows, keys = length_tensors(problem)
    row_padding = torch.arange(problem.M, device=problem.device) >= rows.view(-1, 1, 1)
    key_padding = torch.arange(problem.N, device=problem.device) >= keys.view(-1, 1, 1)
    findings = []
    for name, got, want, _ in _judged(trial, trial.want):
        padding = row_padding if name in _OF_ROWS else key_padding
        padding = padding if name == "lse" else padding.unsqueeze(3)
        findings += _differ(
            trial, name, got, want.to(got.dtype), padding.expand_as(got),
            "G4 dirty padding", "is not exact on padding",
        )  # fmt: skip
    clean = run_subject(trial.subject, problem, make(problem, dirty="zero"))
    return findings + _same(trial, clean, "G4 dirty padding", "depends on what stands in padding")


def hidden_positions(trial: Trial) -> list[Finding]:
    """G5: a pair that the mask hides adds exactly nothing, to the row nor to the key.

    One key of each batch entry is replaced by extreme finite values: rows that do not see it keep
    every bit of out, lse, dq. Then one row: keys that it does not see keep every bit of dk, dv.
    """
    problem = trial.problem
    if 0 in (problem.B, problem.M, problem.N):
        return []
    seen = _seen(problem)
    key = _pick(problem, "key", (~seen).any(2).any(1))
    row = _pick(problem, "row", (~seen).any(3).any(1))
    q, k, v, dout = trial.inputs
    at_key = torch.arange(problem.N, device=problem.device) == key.view(-1, 1)
    at_row = torch.arange(problem.M, device=problem.device) == row.view(-1, 1)
    other_keys = run_subject(
        trial.subject, problem, Inputs(q, _extreme(k, at_key), _extreme(v, at_key), dout)
    )
    other_rows = run_subject(
        trial.subject, problem, Inputs(_extreme(q, at_row), k, v, _extreme(dout, at_row))
    )
    blind_rows = ~(seen & at_key[:, None, None, :]).any(3)
    blind_keys = ~(seen & at_row[:, None, :, None]).any(2).any(1, keepdim=True)
    findings = _same(
        trial, other_keys, "G5 hidden positions", "depends on a key that the row does not see",
        rows=blind_rows, only=_OF_ROWS,
    )  # fmt: skip
    return findings + _same(
        trial, other_rows, "G5 hidden positions", "depends on a row that does not see the key",
        keys=blind_keys, only=_OF_KEYS,
    )  # fmt: skip


GUARANTEES: dict[str, Callable[[Trial], list[Finding]]] = {
    "G1": accuracy,
    "G2": finite,
    "G3": empty_rows,
    "G4": dirty_padding,
    "G5": hidden_positions,
    "T3": logic,
}


def _judged(
    trial: Trial, other: Outputs[torch.Tensor]
) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, got, want, other) of the outputs that the subject returns."""
    return [
        (name, got, want, extra)
        for name, got, want, extra in zip(OUTPUTS, trial.got, trial.want, other, strict=True)
        if got is not None
    ]


def _beyond(
    trial: Trial, limits: Outputs[torch.Tensor], guarantee: str, claim: str
) -> list[Finding]:
    """A finding for each output with an element further than ``limits`` from the oracle's."""
    findings = []
    for name, got, want, limit in _judged(trial, limits):
        ratio = ratios(got, want, limit)
        bad = ratio > 1
        if bad.any():
            findings.append(
                Finding.at(
                    bad,
                    ratio,
                    guarantee=guarantee,
                    claim=claim,
                    subject=trial.subject,
                    problem=trial.problem,
                    output=name,
                    got=got,
                    want=want,
                    bound=limit,
                )
            )
    return findings


def _seen(problem: Problem) -> torch.Tensor:
    """The dense mask, expanded to (B, H, M, N)."""
    sizes = problem.B, problem.H, problem.M, problem.N
    return problem.mask.dense(*sizes, device=problem.device).expand(*sizes)


def _pick(problem: Problem, name: str, wanted: torch.Tensor) -> torch.Tensor:
    """An index per batch entry, (B,), among those ``wanted`` (B, size) if there are any."""
    noise = stream.uniform(problem.seed, f"pick {name}", wanted.shape, problem.device)
    return (noise + wanted).argmax(1)


def _extreme(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x (B, heads, rows, columns) with the largest finite values, signs alternating, at rows."""
    sign = 1 - 2 * (torch.arange(x.shape[3], device=x.device) % 2)
    return torch.where(at[:, None, :, None], torch.finfo(x.dtype).max * sign.to(x.dtype), x)


def _differ(
    trial: Trial,
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    compared: torch.Tensor,
    guarantee: str,
    claim: str,
) -> list[Finding]:
    """A finding if bits differ anywhere in ``compared``."""
    bad = compared & ~same_bits(got, want)
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


def _same(
    trial: Trial,
    again: Outputs[torch.Tensor | None],
    guarantee: str,
    claim: str,
    *,
    rows: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    only: tuple[str, ...] = OUTPUTS,
) -> list[Finding]:
    """Findings where a second run's bits differ, on ``rows`` (B,H,M) and ``keys`` (B,1 or Hk,N)."""
    findings = []
    for name, got, second in zip(OUTPUTS, trial.got, again, strict=True):
        if got is None or second is None or name not in only:
            continue
        part = rows if name in _OF_ROWS else keys
        if part is None:
            part = torch.ones((), dtype=torch.bool, device=got.device)
        elif name != "lse":
            part = part.unsqueeze(3)
        findings += _differ(trial, name, second, got, part.expand_as(got), guarantee, claim)
    return findings
