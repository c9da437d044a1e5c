"""G1 and Q1 of attention to codes with scales, each a function to its findings."""

from __future__ import annotations

import torch

from fa_verify.oracles.formats.element import FORMATS, ElementFormat
from fa_verify.oracles.formats.in_torch import encoded
from fa_verify.oracles.guarantee import G1, Q1
from fa_verify.properties.guarantees.agreement import exact, outside, same_or_inside
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.inputs.quantised import QuantisedInputs
from fa_verify.properties.kinds.quantised import QuantisedTrial, Result, run_quantised

__all__ = ["accuracy", "hidden_codes", "padded_codes"]


def accuracy(trial: QuantisedTrial) -> list[Finding]:
    """G1: out and lse lie within the bound of the replayed forward."""
    return outside(trial, trial.outputs, G1, "leaves the derived bound")


def _form(trial: QuantisedTrial, name: str) -> ElementFormat | None:
    problem = trial.problem
    return FORMATS.get(problem.v if name == "v" else problem.qk)


def _filled(trial: QuantisedTrial, name: str, places: torch.Tensor, value: float) -> torch.Tensor:
    """Return codes with the code of a number in some tokens, bool (B, heads, tokens)."""
    codes, form = getattr(trial.inputs, name), _form(trial, name)
    number = torch.full((1,), value, dtype=torch.float64, device=codes.device)
    if form is None:
        most = torch.finfo(codes.dtype).max
        code = number.clamp(-most, most).to(codes.dtype)
        return torch.where(places.unsqueeze(3), code, codes)
    code = encoded(number if form.nan_code is not None else number.nan_to_num(-128.0), form)
    chosen = torch.where(places.unsqueeze(3), code.view(torch.uint8), codes.view(torch.uint8))
    return chosen.view(codes.dtype)


def _agree(
    trial: QuantisedTrial, x: QuantisedInputs, claim: str, rows: torch.Tensor
) -> list[Finding]:
    """Return findings where a call of other codes differs in rows, bool (B, H, M).

    They differ in a bit if two calls of the same codes do not; else the bound decides.
    """
    subject, problem = trial.subject, trial.problem
    first, again = (run_quantised(subject, problem, y) for y in (trial.inputs, x))
    pairs = zip(first, trial.got, strict=True)
    repeats = all(a is None or b is None or bool(same_bits(a, b).all()) for a, b in pairs)
    where = {"out": rows.unsqueeze(3), "lse": rows}
    outputs = _named(again)
    if not repeats:
        return same_or_inside(trial, outputs, Q1, claim, where=where, promised=())
    return [
        finding
        for name, want in _named(trial.got).items()
        for finding in exact(trial, name, outputs[name], want, where[name], Q1, claim)
    ]


def _named(result: Result) -> dict[str, torch.Tensor]:
    return {name: x for name, x in zip(("out", "lse"), result, strict=True) if x is not None}


def padded_codes(trial: QuantisedTrial) -> list[Finding]:
    """Q1: codes in padding change no bit: NaN, the largest numbers, and zeros."""
    a, x = trial.problem.attention, trial.inputs
    rows, keys = (
        torch.arange(size, device=a.device).view(1, 1, -1)
        >= torch.tensor(lengths, device=a.device).view(-1, 1, 1)
        for size, lengths in zip((a.M, a.N), a.mask.lengths(a.B, a.M, a.N), strict=True)
    )
    if not (rows.any() or keys.any()):
        trial.not_applicable(Q1.key, "without padding")
        return []
    trial.applies(Q1.key)
    findings = []
    subject = trial.subject
    allowed = subject.dirty
    for word, value in (("nan", torch.nan), ("max", 1e9), ("zero", 0.0)):
        if allowed is not None and word not in allowed:
            continue
        changed = x._replace(
            q=_filled(trial, "q", rows.expand(a.B, a.H, a.M), value),
            k=_filled(trial, "k", keys.expand(a.B, a.Hk, a.N), value),
            v=_filled(trial, "v", keys.expand(a.B, a.Hk, a.N), value),
        )
        everywhere = torch.ones((a.B, a.H, a.M), dtype=torch.bool, device=a.device)
        claim = f"depends on codes in padding, here of {value}"
        findings += _agree(trial, changed, claim, everywhere)
    return findings


def hidden_codes(trial: QuantisedTrial) -> list[Finding]:
    """Q1: codes of a key that a row does not see, its scale unchanged, change none of its bits.

    First all keys change that no row sees, then the last key that some rows see and others do not.
    """
    a, x = trial.problem.attention, trial.inputs
    if 0 in (a.B, a.M, a.N):
        trial.not_applicable(Q1.key, "without a query and a key")
        return []
    seen = a.mask.dense(a.B, a.H, a.M, a.N, device=a.device).expand(a.B, a.H, a.M, a.N)
    _, keys = a.mask.lengths(a.B, a.M, a.N)
    held = torch.arange(a.N, device=a.device) < torch.tensor(keys, device=a.device)[:, None]
    # (B, Hk, G, M, N)
    of_groups = seen.reshape(a.B, a.Hk, a.G, a.M, a.N)
    by_some = of_groups.any(2).any(2)
    partly = by_some & ~of_groups.all(2).all(2) & held[:, None]
    last = torch.where(partly, torch.arange(a.N, device=a.device), -1).amax(2, keepdim=True)
    one = partly & (torch.arange(a.N, device=a.device) == last)
    findings = []
    for places, claim in (
        (held[:, None] & ~by_some, "depends on keys that no row sees"),
        (one, "depends on a key that the row does not see"),
    ):
        if not places.any():
            continue
        trial.applies(Q1.key)
        blind = ~(of_groups & places[:, :, None, None]).any(4).reshape(a.B, a.H, a.M)
        changed = x._replace(
            k=_filled(trial, "k", places, 1e9), v=_filled(trial, "v", places, -1e9)
        )
        findings += _agree(trial, changed, claim, blind)
    if Q1.key not in trial.asked:
        trial.not_applicable(Q1.key, "where every row sees every key")
    return findings
