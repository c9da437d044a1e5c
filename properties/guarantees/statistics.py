"""Statistics of errors, which detect faults that are too small for the bound.

The bound must allow a single error to be as large as all roundings together can make it. Over many
rows the errors of a correct kernel have a known mean square and no preferred sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.guarantee import BIAS, RMS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.running.trial import AttentionTrial

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

# A correct kernel exceeds a limit with a probability of at most exp(-RARE), about 1e-8.
RARE = 18.0
# Allowed error of the predicted mean square itself. 0.92 to 1.10 of the prediction was observed on
# kernels of other projects.
SLACK = 1.15
# Smallest number of terms in a row or key: the errors of a few products do not average out.
FEWEST = 8
# Smallest head_dim and head_dim_v. Dot products over fewer columns have heavy tails, so that a few
# rows and the errors of their delta dominate the gradients of all keys.
_FEWEST_COLUMNS = 8
# Limits of the standard deviation of scores. With equal weights every cast has the same error. With
# a large spread a single key dominates a row and its error.
_SPREADS = (0.1, 2.0)
# Smallest softcap in units of the largest spread: a smaller one makes the scores nearly equal.
_WIDEST = 2.0
# Families of ALiBi slopes without effect: with a slope a few keys dominate a row.
_FLAT_ALIBI = (NO_ALIBI, "none_at_all")
# Families of biases: with others a few keys dominate a row, or lse is shifted far.
_FLAT_BIAS = (NO_BIAS, "normal")
_FLAT_SINKS = (NO_SINKS, "ordinary", "absent")
_FEWEST_ROWS = 64  # needed to estimate the spread of the rows' means
_PRODUCTS = 16  # number of products that a tensor core adds at a time


@dataclass(frozen=True)
class _Errors:
    """The errors of one output in units of their predicted spread.

    Args:
        name: Name of the output.
        z: (rows, D or Dv): the errors in the rows (dk and dv: keys) that count; NaN stays NaN.
        want: The true values, same shape.
        spread: The predicted spreads, same shape.
        terms: (rows, 1): the number of terms of a row.
        places: (rows, 3): batch entry, head and row of each.
    """

    name: str
    z: torch.Tensor
    want: torch.Tensor
    spread: torch.Tensor
    terms: torch.Tensor
    places: torch.Tensor


def is_valid(problem: Problem) -> bool:
    """Return whether the errors of a problem follow the predicted variances.

    This requires a 16-bit dtype, for which the modelled roundings outweigh all others. The values
    must be continuous and independent between heads, and the scores neither equal nor dominated by
    one key. The dot products must have enough columns.
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
        and problem.sinks in _FLAT_SINKS
    )


def mean_square_limit(samples: float) -> float:
    """Return the limit for the mean square of ``samples`` errors, in units of their spreads.

    With probability 1 - exp(-x), the mean of n squares stays below 1 + 2 sqrt(x / n) + 2 x / n. The
    limit uses x = ``RARE`` and a factor of ``SLACK``.

    Source: Laurent and Massart 2000 (doi 10.1214/aos/1015957395), lemma 1.
    """
    return SLACK * (1 + 2 * math.sqrt(RARE / samples) + 2 * RARE / samples)


def rms(trial: AttentionTrial) -> list[Finding]:
    """RMS: the mean square of error / predicted spread is about 1 in out, dq, dk and dv.

    Only a larger value is a finding: a kernel may round less than assumed. The errors of a row are
    correlated, as they share the casts of P and delta, so a row counts as one sample.
    """
    return [x for errors in _errors(trial) for x in _mean_square(trial, errors)]


def mean_squares(trial: AttentionTrial) -> dict[str, float]:
    """Return the mean square of error / predicted spread by output, as used by ``rms``.

    Returns an empty dict if ``is_valid`` is False for the problem.
    """
    return {errors.name: float(errors.z.square().mean()) for errors in _errors(trial)}


def bias(trial: AttentionTrial) -> list[Finding]:
    """The mean of error / predicted spread, times the sign of the true value, is 0.

    Checks out, dq, dk and dv. A negative mean is toward zero, as with truncation. The values have
    both signs, so the errors of a correct kernel have no preferred direction. A row counts as one
    sample; the spread of the rows' means is estimated from the rows.

    Two effects of correct kernels widen the limit of each element. The accumulators of tensor cores
    truncate, by up to 2 u per addition of 16 products. Rounding to nearest itself drifts by u_in of
    a spread, because larger values are rarer than smaller ones.
    """
    return [x for errors in _errors(trial) for x in _mean(trial, errors)]


def _mean_square(trial: AttentionTrial, errors: _Errors) -> list[Finding]:
    """Check ``rms`` for one output."""
    rows = errors.z.square().mean(1)
    limit = mean_square_limit(len(rows))
    mean = float(rows.mean())
    if mean <= limit:
        return []
    claim = "has larger errors than its roundings explain, by the mean square of error/spread"
    return [_finding(trial, errors, RMS, claim, rows, mean, 1.0, limit - 1)]


def _mean(trial: AttentionTrial, errors: _Errors) -> list[Finding]:
    """Check ``bias`` for one output."""
    if len(errors.z) < _FEWEST_ROWS:
        return []
    # Negative is toward zero.
    rows = (errors.z * errors.want.sign()).mean(1)
    c = constants(trial.problem.dtype, trial.subject.numerics_of(trial.problem))
    additions = errors.terms / _PRODUCTS + 8
    # The largest mean of a correct kernel.
    drift = 2 * c.h * c.u * additions * errors.want.abs() / errors.spread + 2 * c.u_in
    mean, variance, largest = torch.stack([rows.mean(), rows.var(), drift.mean()]).tolist()
    # At least the spread of independent errors, in case the rows agree by chance.
    spread = math.sqrt(max(variance, 1 / errors.z.shape[1]))
    limit = spread * math.sqrt(2 * SLACK * RARE / len(rows)) + largest
    if abs(mean) <= limit:
        return []
    claim = "has one-sided errors, by the mean of error/spread away from zero"
    return [_finding(trial, errors, BIAS, claim, rows.abs(), mean, 0.0, limit)]


def _errors(trial: AttentionTrial) -> Iterator[_Errors]:
    """Yield the errors of out, dq, dk and dv; none if ``is_valid`` is False.

    The roundings of partial sums that are added in the dtype are not modelled.
    """
    problem = trial.problem
    if not is_valid(problem):
        return
    variance, rounded = trial.variances, trial.subject.numerics_of(problem).rounded_sums
    for names, terms in ((("out", "dq"), variance.keys_seen), (("dk", "dv"), variance.rows_seen)):
        # A GPU is waited for here, but not for elements at places that are known.
        places = (terms >= FEWEST).nonzero()
        counted = places.unbind(1)
        for name in names:
            got = getattr(trial.got, name)
            if got is None or not len(places) or name in rounded:
                continue
            want = getattr(trial.want, name)[counted]
            spread = getattr(variance, name)[counted].sqrt()
            z = (got[counted].to(torch.float64) - want) / spread
            yield _Errors(name, z, want, spread, terms[counted].unsqueeze(1), places)


def _finding(
    trial: AttentionTrial,
    errors: _Errors,
    guarantee: str,
    claim: str,
    rows: torch.Tensor,
    got: float,
    want: float,
    bound: float,
) -> Finding:
    """Return a finding about a mean over rows that names the row which contributes most."""
    worst = int(rows.nan_to_num(nan=torch.inf).argmax())
    axes = "bhm" if errors.name in ("out", "dq") else "bhn"
    place = " ".join(
        f"{axis}={i}" for axis, i in zip(axes, errors.places[worst].tolist(), strict=True)
    )
    bad = ~(rows <= abs(want) + bound)
    return Finding(
        guarantee=guarantee,
        claim=claim,
        subject=trial.subject.name,
        output=errors.name,
        where=f"mean over {len(rows)} rows",
        got=got,
        want=want,
        bound=bound,
        bad=int(bad.sum()),
        total=len(rows),
        places=f"the worst, {place}, has {float(rows[worst]):.4g}",
        problem=trial.problem,
        unit="rows",
    )
