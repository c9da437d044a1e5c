"""Statistics of errors: the mean square and the mean of all errors, for faults too small for it.

A bound must let a single error be as large as all roundings together can make it. Over many rows
the errors of a correct kernel have a known mean square, and no preferred sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.problem import Problem
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import Trial
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS

__all__ = [
    "FEWEST",
    "RARE",
    "SLACK",
    "bias",
    "is_valid",
    "mean_square_limit",
    "mean_squares",
    "rms",
]

# A correct kernel exceeds a limit once in exp(RARE) times at most: 1e-8.
RARE = 18.0
# How far the predicted mean square may itself be off: a square of 0.92 to 1.10 was observed on
# kernels that others wrote.
SLACK = 1.15
# Below it the errors of a row, or a key, are those of a few products and follow no average.
FEWEST = 8
# Of head_dim and head_dim_v: a dot of fewer columns has heavy tails, so that a few rows, and the
# error of their delta, dominate the gradients of all keys alike.
_FEWEST_COLUMNS = 8
# Scores need a spread: of many equal weights every cast errs alike. With a wide one, a single key
# takes a row, and its errors with it.
_SPREADS = (0.1, 2.0)
# Of softcap, in the largest of these spreads: a narrower one makes scores alike again.
_WIDEST = 2.0
# Of ALiBi: slopes leave a row a few keys.
_FLAT_ALIBI = (NO_ALIBI, "none_at_all")
# Of a bias: the others leave a row a few keys, or shift its lse far off.
_FLAT_BIAS = (NO_BIAS, "normal")
_FEWEST_ROWS = 64  # whose spread is taken from themselves
_PRODUCTS = 16  # a tensor core adds this many products at a time


@dataclass(frozen=True)
class _Errors:
    """One output's errors in units of their predicted spread.

    Args:
        name: Of the output.
        z: (rows, D or Dv): of the rows (dk, dv: keys) that count; NaN stays NaN.
        toward: Its sign turned so that negative is toward zero.
        drift: How far a correct kernel's ``toward`` may be from 0 on average.
        places: (rows, 3): batch entry, head, row of each.
    """

    name: str
    z: torch.Tensor
    toward: torch.Tensor
    drift: torch.Tensor
    places: torch.Tensor


def is_valid(problem: Problem) -> bool:
    """Whether errors of the problem follow the predicted variances.

    They do for 16-bit dtypes, where the modelled roundings outweigh all others; continuous values
    that are independent between heads; scores neither all alike nor dominated by one key; dots of
    enough columns.
    """
    low, high = _SPREADS
    return (
        problem.dtype in ("fp16", "bf16")
        and (problem.inputs, problem.dout) == ("normal", "normal")
        and "expanded" not in problem.layouts
        and min(problem.D, problem.Dv) >= _FEWEST_COLUMNS
        and low <= problem.scale * math.sqrt(problem.D) <= high
        and (problem.softcap is None or problem.softcap >= _WIDEST * high)
        and problem.alibi in _FLAT_ALIBI
        and problem.bias.partition("/")[0] in _FLAT_BIAS
    )


def mean_square_limit(samples: float) -> float:
    """What the mean square of so many errors, in units of their spreads, exceeds only rarely.

    With probability 1 - exp(-x), the mean of n squares stays below 1 + 2 sqrt(x / n) + 2 x / n.

    Source: Laurent and Massart 2000 (doi 10.1214/aos/1015957395), lemma 1.
    """
    return SLACK * (1 + 2 * math.sqrt(RARE / samples) + 2 * RARE / samples)


def rms(trial: Trial) -> list[Finding]:
    """The mean square of error / predicted spread is about 1 in each of out, dq, dk, dv.

    Only excess counts: rounding less than assumed is no fault. Errors of one row are correlated
    (they share the casts of P and delta), so a row counts as one sample, as if its errors were all
    the same.
    """
    return [x for errors in _errors(trial) for x in _mean_square(trial, errors)]


def mean_squares(trial: Trial) -> dict[str, float]:
    """What ``rms`` looks at, by output: the mean square of error / predicted spread, about 1.

    Nothing where the model does not speak of the problem.
    """
    return {errors.name: float(errors.z.square().mean()) for errors in _errors(trial)}


def bias(trial: Trial) -> list[Finding]:
    """The mean of error / predicted spread, signed by the true value, is 0 in out, dq, dk, dv.

    Negative is toward zero, as truncation errs. The values have both signs, so a correct kernel's
    errors have none. A row is one sample; the spread of a row's mean is taken from the rows. Two
    things drift, and widen the limit element by element: a truncating accumulator (tensor cores),
    by up to 2 u per addition of 16 products, and rounding to nearest itself, by u_in of a spread,
    where larger values are rarer than smaller ones.
    """
    return [x for errors in _errors(trial) for x in _mean(trial, errors)]


def _mean_square(trial: Trial, errors: _Errors) -> list[Finding]:
    """``rms`` of one output."""
    rows = errors.z.square().mean(1)
    limit = mean_square_limit(len(rows))
    mean = float(rows.mean())
    if mean <= limit:
        return []
    claim = "errs more than its roundings explain: mean square in units of the predicted"
    return [_finding(trial, errors, "RMS", claim, rows, mean, 1.0, limit - 1)]


def _mean(trial: Trial, errors: _Errors) -> list[Finding]:
    """``bias`` of one output."""
    rows = errors.toward.mean(1)
    if len(rows) < _FEWEST_ROWS:
        return []
    # No less than that of independent errors, should the rows agree by chance.
    spread = math.sqrt(max(float(rows.var()), 1 / errors.z.shape[1]))
    limit = spread * math.sqrt(2 * SLACK * RARE / len(rows)) + float(errors.drift.mean())
    mean = float(rows.mean())
    if abs(mean) <= limit:
        return []
    claim = "errs to one side: mean error away from zero in units of the predicted spread,"
    return [_finding(trial, errors, "bias", claim, rows.abs(), mean, 0.0, limit)]


def _errors(trial: Trial) -> Iterator[_Errors]:
    """The errors of the outputs that the model speaks of, if it speaks of the problem at all."""
    problem = trial.problem
    if not is_valid(problem):
        return
    variance = trial.variances
    c = constants(problem.dtype, trial.subject.numerics_of(problem))
    for name, terms in (
        ("out", variance.keys_seen),
        ("dq", variance.keys_seen),
        ("dk", variance.rows_seen),
        ("dv", variance.rows_seen),
    ):
        counted = terms >= FEWEST
        got, want = getattr(trial.got, name), getattr(trial.want, name)[counted]
        if got is None or not counted.any():
            continue
        spread = getattr(variance, name)[counted].sqrt()
        z = (got[counted].to(torch.float64) - want) / spread
        additions = terms[counted].unsqueeze(1) / _PRODUCTS + 8
        drift = 2 * c.h * c.u * additions * want.abs() / spread + 2 * c.u_in
        yield _Errors(name, z, z * want.sign(), drift, counted.nonzero())


def _finding(
    trial: Trial,
    errors: _Errors,
    guarantee: str,
    claim: str,
    rows: torch.Tensor,
    got: float,
    want: float,
    bound: float,
) -> Finding:
    """A finding on a mean over rows, which names the row that contributes most."""
    worst = int(rows.nan_to_num(nan=torch.inf).argmax())
    axes = "bhm" if errors.name in ("out", "dq") else "bhn"
    place = " ".join(
        f"{axis}={i}" for axis, i in zip(axes, errors.places[worst].tolist(), strict=True)
    )
    bad = ~(rows <= abs(want) + bound)
    return Finding(
        guarantee=guarantee,
        claim=f"{claim} over {len(rows)} rows",
        subject=trial.subject.name,
        output=errors.name,
        where=place,
        got=got,
        want=want,
        bound=bound,
        bad=int(bad.sum()),
        total=len(rows),
        places=f"that row alone has {float(rows[worst]):.4g}",
        problem=trial.problem,
    )
