"""Closed forms: inputs for which the correct output is known exactly, without an oracle.

With k = 0 all scores are 0, so each of the n keys that a row sees has the weight 1 / n exactly.
Every check runs the subject again. The values in padding are those of the problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.guarantee import EXACT, G9, G10
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import TENSORS, Problem
from fa_verify.oracles.reference.torch_reference import RowMasks, chunk_height
from fa_verify.properties.guarantees.agreement import agree, found_where
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.inputs.families import (
    NO_ALIBI,
    NO_BIAS,
    NO_DLSE,
    NO_SINKS,
    length_tensors,
)
from fa_verify.properties.inputs.layouts import lay_out
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.running.trial import AttentionTrial, run_subject

__all__ = ["counts", "doubled_values", "mask_read_back", "permuted", "unit_values"]

_COUNTED = 65_536  # exp(lse) in fp32 is within a half of the count up to here
_FACTOR = 8.0
_SMALLEST = 2.0**-126  # the smallest normal fp32 number; float64 accumulators have a wider range
_DIGITS = 2.0**-48  # relative weight of the last digit of a product of two fp32 numbers


def counts(trial: AttentionTrial) -> list[Finding]:
    """With k = 0, round(exp(lse)) is exactly the number of keys that a row sees.

    The softmax adds n ones, which is exact in fp32. The errors of logarithm, base conversion and
    storage together stay below half a key up to n = 65,536; rows with more keys are not compared.

    The bound on lse allows an error in each addition. It therefore misses a key too many or too
    few beyond some 2,400 keys, or 5,000 if they are added tile by tile.

    Returns no findings if the subject does not return lse.
    """
    if trial.got.lse is None:
        return []
    problem = trial.problem
    lse = run_subject(trial.subject, problem, _equal_weights(problem)).lse
    assert lse is not None
    want = torch.zeros_like(lse, dtype=torch.float64)
    for start, seen in _seen_by_rows(problem):
        want[:, :, start : start + seen.shape[2]] = seen.sum(3)
    got = lse.to(torch.float64).exp().round()
    compared = want <= _COUNTED
    bad = compared & ~(got == want)
    return _found(
        trial, "lse", bad, got, want, "does not count the visible keys, as exp(lse) with k = 0",
        compared=compared,
    )  # fmt: skip


def mask_read_back(trial: AttentionTrial) -> list[Finding]:
    """With k = 0 and one-hot values, the nonzero elements of out and dv reproduce the mask.

    The problem's seed selects Dv consecutive keys. The d-th of them has v = 1 in column d, and all
    other v are 0: out[m, d] is nonzero exactly where row m sees the d-th of these keys. In the same
    way, one-hot dout in Dv consecutive rows of every head reproduces these rows of the mask in dv.
    The weight 1 / n is nonzero in every dtype up to n = 65,536 keys (fp16 represents 2**-24).
    """
    problem = trial.problem
    equal = _equal_weights(problem)
    first_key = _first(problem, "key", problem.N)
    first_row = _first(problem, "row", problem.M)
    v = _with_values(problem, equal.v, "v", _one_hot(problem, problem.N, first_key))
    dout = _with_values(problem, equal.dout, "dout", _one_hot(problem, problem.M, first_row))
    got = run_subject(trial.subject, problem, equal._replace(v=v, dout=dout))
    by_out = torch.zeros_like(dout, dtype=torch.bool)
    by_dv = torch.zeros_like(v, dtype=torch.bool)
    for start, seen in _seen_by_rows(problem):
        here = seen[:, :, :, first_key : first_key + problem.Dv]
        by_out[:, :, start : start + seen.shape[2], : here.shape[3]] = here
        of_group = seen.view(problem.B, problem.Hk, -1, *seen.shape[2:]).any(2)
        skipped = max(0, first_row - start)
        rows = of_group[:, :, skipped : max(0, first_row + problem.Dv - start)].mT
        column = start + skipped - first_row
        by_dv[:, :, :, column : column + rows.shape[3]] = rows
    findings = []
    for name, x, seen in (("out", got.out, by_out), ("dv", got.dv, by_dv)):
        if x is None:  # a subject without gradients
            continue
        bad = ((x != 0) != seen) | ~x.isfinite()
        claim = f"does not show the mask with k = 0 (from key {first_key}, row {first_row})"
        findings += _found(trial, name, bad, x, seen, claim)
    return findings


def unit_values(trial: AttentionTrial) -> list[Finding]:
    """With k = 0 and v = 1, out is exactly 1 on rows that see a key; fp16 and bf16 only.

    The sum of n ones, divided by n or multiplied by a rounded 1 / n, rounds to 1 in 16 bits. This
    need not hold for other k, since the softmax sums the weights before they are rounded.
    """
    problem = trial.problem
    if problem.dtype not in ("fp16", "bf16"):
        return []
    equal = _equal_weights(problem)
    ones = torch.ones((), dtype=torch.float64, device=problem.device)
    v = _with_values(problem, equal.v, "v", ones)
    out = run_subject(trial.subject, problem, equal._replace(v=v)).out
    assert out is not None
    live = torch.zeros_like(out, dtype=torch.bool)
    for start, seen in _seen_by_rows(problem):
        live[:, :, start : start + seen.shape[2]] = seen.any(3, keepdim=True)
    want = torch.ones_like(out)
    return _found(
        trial, "out", live & ~(out == 1), out, want, "is not 1 for k = 0 and v = 1", compared=live
    )


def doubled_values(trial: AttentionTrial) -> list[Finding]:
    """The forward is linear in v bitwise: 8 v gives 8 out and the same lse.

    A power of two changes no rounding without overflow and underflow. The check therefore applies
    if 8 |v| is finite and all digits of every product of a weight and a value stay above the
    smallest normal number. Elements of out below the smallest normal number of their dtype are not
    compared. A subject that does not promise G10 is compared by the bound, as in ``agree``.
    """
    problem, v = trial.problem, trial.inputs.v
    info = torch.finfo(v.dtype)
    valid = _valid(problem, "v").expand_as(v)
    sizes = v[valid].abs().to(torch.float64)
    nonzero = sizes[sizes > 0]
    if not nonzero.numel():
        return []
    least = math.exp(-2 * trial.judgement.max_score) * float(nonzero.amin()) * _DIGITS
    if float(nonzero.amax()) * _FACTOR > info.max or least < _SMALLEST:
        return []
    scaled = _with_values(problem, v, "v", v.to(torch.float64) * _FACTOR)
    got = run_subject(trial.subject, problem, trial.inputs._replace(v=scaled))
    findings = []
    for name, factor in (("out", _FACTOR), ("lse", 1.0)):
        first, second = getattr(trial.got, name), getattr(got, name)
        if first is None:
            continue
        claim = f"is not {factor:g} times as much for v times {_FACTOR:g}"
        second = second.to(torch.float64)
        if name not in trial.subject.promises(G10, problem.config):
            alone = Outputs(*(second / factor if x == name else None for x in OUTPUTS))
            findings += agree(trial, alone, EXACT, claim, promised=())
            continue
        want = first.to(torch.float64) * factor
        compared = torch.ones_like(first, dtype=torch.bool)
        if name == "out":
            compared = first.abs() > info.smallest_normal
        bad = compared & ~same_bits(second, want)
        findings += _found(trial, name, bad, second, want, claim, compared=compared)
    return findings


def permuted(trial: AttentionTrial) -> list[Finding]:
    """Reversing the order of batch entries and groups of heads reverses that of the outputs.

    The comparison is bitwise for a subject that promises G9 and G10, otherwise by the bound, as in
    ``agree``.
    """
    problem = trial.problem
    entries, heads = range(problem.B)[::-1], _reversed(torch.arange(problem.H)[None], problem.Hk)
    mask = problem.mask.sliced(tuple(entries), tuple(heads[0].tolist()))
    turned = dataclasses.replace(problem, mask=mask)
    pairs = zip(trial.inputs.tensors, problem.layouts, strict=True)
    inputs = Inputs(*(lay_out(_reversed(x, problem.Hk), layout) for x, layout in pairs))
    if trial.inputs.dlse is not None:
        inputs = inputs._replace(dlse=_reversed(trial.inputs.dlse, problem.Hk))
    slopes = trial.inputs.alibi_slopes
    if slopes is not None:
        by_entry = _reversed(slopes.view(-1, problem.H), problem.Hk)
        inputs = inputs._replace(alibi_slopes=by_entry.view(slopes.shape))
    bias = trial.inputs.bias
    if bias is not None:
        of_all = bias.expand(problem.B, problem.H, -1, -1)
        inputs = inputs._replace(bias=_reversed(of_all, problem.Hk))
    sinks = trial.inputs.sinks
    if sinks is not None:
        inputs = inputs._replace(sinks=_reversed(sinks[None], problem.Hk)[0])
    again = run_subject(trial.subject, turned, inputs)
    back = Outputs(*(None if x is None else _reversed(x, problem.Hk) for x in again))
    alone, repeated = (trial.subject.promises(word, problem.config) for word in (G9, G10))
    claim = "depends on the order of batch entries and heads"
    return agree(trial, back, EXACT, claim, promised={*alone} & {*repeated})


def _equal_weights(problem: Problem) -> Inputs:
    """Return inputs with k = 0, N(0, 1) values elsewhere, and a loss on out only.

    There is no ALiBi, no bias and no sink. A softcap maps a score of 0 to 0.
    """
    plain = dataclasses.replace(problem, alibi=NO_ALIBI, bias=NO_BIAS, sinks=NO_SINKS)
    return make(dataclasses.replace(plain, inputs="zero_k", dout="normal", dlse=NO_DLSE))


def _seen_by_rows(problem: Problem) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the mask in chunks of rows, as (first row, bool of shape (B, H, rows, N))."""
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    if 0 in (B, M, N):
        return
    masks = RowMasks(problem.mask, B, H, M, N, torch.device(problem.device))
    height = chunk_height(None, B, H, N)
    for start in range(0, M, height):
        stop = min(start + height, M)
        yield start, masks.between(start, stop).expand(B, H, stop - start, N)


def _first(problem: Problem, name: str, size: int) -> int:
    """Draw where Dv consecutive rows or keys begin; 0 if there are fewer than Dv."""
    places = max(1, size - problem.Dv + 1)
    return (int(stream.integers(problem.seed, f"read back/{name}", (1,))) & (2**63 - 1)) % places


def _one_hot(problem: Problem, size: int, first: int) -> torch.Tensor:
    """Return a float64 tensor of shape (size, Dv) that is 1 at (first + d, d) and 0 elsewhere."""
    place = torch.arange(size, device=problem.device).unsqueeze(1) - first
    return (place == torch.arange(problem.Dv, device=problem.device)).to(torch.float64)


def _valid(problem: Problem, tensor: str) -> torch.Tensor:
    """Return a bool tensor of shape (B, 1, M or N, 1) that is False in padding."""
    rows, keys = length_tensors(problem)
    size, lengths = (problem.M, rows) if tensor in ("q", "dout") else (problem.N, keys)
    index = torch.arange(size, device=problem.device)
    return (index < lengths.unsqueeze(1))[:, None, :, None]


def _with_values(
    problem: Problem, x: torch.Tensor, tensor: str, values: torch.Tensor
) -> torch.Tensor:
    """Replace a tensor's values outside padding, keeping the problem's layout."""
    replaced = torch.where(_valid(problem, tensor), values.to(x.dtype), x)
    return lay_out(replaced, problem.layouts[TENSORS.index(tensor)])


def _reversed(x: torch.Tensor, Hk: int) -> torch.Tensor:
    """Reverse the order of batch entries and groups of heads, not of the heads in a group."""
    groups = x.reshape(x.shape[0], Hk, x.shape[1] // Hk, *x.shape[2:])
    return groups.flip(0, 1).reshape(x.shape)


def _found(
    trial: AttentionTrial,
    output: str,
    bad: torch.Tensor,
    got: torch.Tensor,
    want: torch.Tensor,
    claim: str,
    compared: torch.Tensor | None = None,
) -> list[Finding]:
    """Return a finding if any element is bad."""
    return found_where(trial, output, bad, got, want, EXACT, claim, compared)
