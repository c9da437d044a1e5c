"""G3, G4 and G5: empty rows, padding and hidden pairs do not affect the results."""

from __future__ import annotations

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.guarantee import G3, G4, G5
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.agreement import OF_KEYS, OF_ROWS, agree, exact
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.families import length_tensors
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.running.trial import AttentionTrial, run_subject

__all__ = [
    "dirty_padding", "empty_rows", "extreme", "hidden_positions", "partly_hidden", "seen_by_rows"
]  # fmt: skip


def empty_rows(trial: AttentionTrial) -> list[Finding]:
    """G3: rows without a visible key have out = 0, lse = -inf, dq = 0 and add nothing to dk, dv.

    Their dout and dlse are ignored: a second run with NaN there must agree everywhere. A row that
    sees a sink alone is exempt from both: its lse is the sink, and its dlse adds to dsinks.
    """
    problem = trial.problem
    empty = ~seen_by_rows(problem).any(3)
    blind = empty & (trial.want.lse == -torch.inf)
    findings = []
    for name, got, want in zip(OUTPUTS, trial.got, trial.want, strict=True):
        if got is not None and name in OF_ROWS:
            rows = blind if name == "lse" else empty.unsqueeze(3)
            claim = "is not exact on a row without a visible key"
            findings += exact(trial, name, got, want.to(got.dtype), rows, G3, claim)
    if not blind.any():
        trial.not_applicable(G3.key, "where every row sees a key")
        return findings
    trial.applies(G3.key)
    inputs = trial.inputs
    poisoned = inputs._replace(dout=torch.where(blind.unsqueeze(3), torch.nan, inputs.dout))
    if inputs.dlse is not None:
        poisoned = poisoned._replace(dlse=torch.where(blind, torch.nan, inputs.dlse))
    again = run_subject(trial.subject, problem, poisoned)
    return findings + agree(trial, again, G3, "depends on dout of a row without a visible key")


def dirty_padding(trial: AttentionTrial) -> list[Finding]:
    """G4: values in padding do not affect other elements, and their gradients are exactly 0."""
    problem = trial.problem
    rows, keys = length_tensors(problem)
    row_padding = torch.arange(problem.M, device=problem.device) >= rows.view(-1, 1, 1)
    key_padding = torch.arange(problem.N, device=problem.device) >= keys.view(-1, 1, 1)
    findings = []
    for name, got, want in zip(OUTPUTS, trial.got, trial.want, strict=True):
        if got is None:
            continue
        padding = row_padding if name in OF_ROWS else key_padding
        padding = padding if name == "lse" else padding.unsqueeze(3)
        claim = "is not exact on padding"
        findings += exact(trial, name, got, want.to(got.dtype), padding, G4, claim)
    if row_padding.any() or key_padding.any():
        trial.applies(G4.key)
    else:
        trial.not_applicable(G4.key, "without padding")
    clean = run_subject(trial.subject, problem, make(problem, dirty="zero"))
    return findings + agree(trial, clean, G4, "depends on values in padding")


def hidden_positions(trial: AttentionTrial) -> list[Finding]:
    """G5: a hidden pair affects neither the results of its row nor those of its key.

    One key of each batch entry is replaced by extreme finite values: out, lse and dq of rows that
    do not see it must not change. Then one row is replaced: dk and dv of keys that it does not see
    must not change. An extreme query may make lse overflow, so that P is 0 for any dP; for every
    other seed, only dout of the row is extreme.
    """
    problem = trial.problem
    if 0 in (problem.B, problem.M, problem.N):
        trial.not_applicable(G5.key, "without a query and a key")
        return []
    seen = seen_by_rows(problem)
    if seen.all():
        trial.not_applicable(G5.key, "where every row sees every key")
    else:
        trial.applies(G5.key)
    key = partly_hidden(problem, "key", seen.transpose(2, 3))
    row = partly_hidden(problem, "row", seen)
    inputs = trial.inputs
    at_key = torch.arange(problem.N, device=problem.device) == key.view(-1, 1)
    at_row = torch.arange(problem.M, device=problem.device) == row.view(-1, 1)
    keys = inputs._replace(k=extreme(inputs.k, at_key), v=extreme(inputs.v, at_key))
    other_keys = run_subject(trial.subject, problem, keys)
    other_q = extreme(inputs.q, at_row) if problem.seed % 2 else inputs.q
    rows = inputs._replace(q=other_q, dout=extreme(inputs.dout, at_row))
    other_rows = run_subject(trial.subject, problem, rows)
    blind_rows = ~(seen & at_key[:, None, None, :]).any(3)
    blind_keys = ~(seen & at_row[:, None, :, None]).any(2).any(1, keepdim=True)
    findings = agree(
        trial, other_keys, G5, "depends on a key that the row does not see",
        rows=blind_rows, only=OF_ROWS,
    )  # fmt: skip
    return findings + agree(
        trial, other_rows, G5, "depends on a row that does not see the key",
        keys=blind_keys, only=OF_KEYS,
    )  # fmt: skip


def seen_by_rows(problem: Problem) -> torch.Tensor:
    """Return the dense mask, expanded to (B, H, M, N)."""
    sizes = problem.B, problem.H, problem.M, problem.N
    return problem.mask.dense(*sizes, device=problem.device).expand(*sizes)


def partly_hidden(problem: Problem, name: str, seen: torch.Tensor) -> torch.Tensor:
    """Pick a row or a key for each batch entry, int (B,).

    Prefers one that sees some but not all of the others, then one that does not see all. A kernel
    may skip one that sees none of the others.

    Args:
        problem: The problem, whose seed determines the draw.
        name: Name of the draw, "row" or "key".
        seen: Bool (B, H, size, others), as ``seen_by_rows``; transposed to pick a key.
    """
    hidden = (~seen).any(3).any(1)
    partly = ((~seen).any(3) & seen.any(3)).any(1)
    noise = stream.uniform(problem.seed, f"pick {name}", hidden.shape, problem.device)
    return (noise + hidden + partly).argmax(1)


def extreme(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Replace rows of x by the largest finite value of its dtype, signs alternating by column.

    Args:
        x: (B, heads, rows, columns).
        at: Bool (B, rows), the rows to replace.
    """
    sign = 1 - 2 * (torch.arange(x.shape[3], device=x.device) % 2)
    return torch.where(at[:, None, :, None], torch.finfo(x.dtype).max * sign.to(x.dtype), x)
