"""Sums of a subject's own outputs that are equal in exact arithmetic: no oracle's value is needed.

Per key/value head, over all keys n and all rows m of the group's heads::

    sum_n dk = 0              a vector added to every key changes no weight
    sum_n dv = sum_m dout     weights add up to 1
    sum q.dq = sum k.dk       both are sum dS s
    sum v.dv = sum out.dout   both are sum p dP
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from properties.companions import FEWEST, RARE, SLACK, is_valid, mean_square_limit
from properties.compare import Finding
from properties.trial import Trial

__all__ = ["identities", "sharp_identities"]

_ROUNDOFF = 2.0**-53  # of the sums taken here


class _Sum(NamedTuple):
    """A sum over rows or keys, and how far it may be from that of the true values."""

    value: torch.Tensor
    bound: torch.Tensor


class _Identity(NamedTuple):
    """Two sums that should be equal, (B, Hk) or (B, Hk, D or Dv) each."""

    claim: str
    output: str  # that it tells most about
    variance: str  # the field of ``oracles.variance.Variances``
    left: _Sum
    right: _Sum

    @property
    def error(self) -> torch.Tensor:
        return (self.left.value - self.right.value).abs()


def identities(trial: Trial) -> list[Finding]:
    """Each identity holds within the sum of the bounds of its elements.

    Outputs within their bounds satisfy it, so it finds no more than a comparison with the oracle
    does; but where both find nothing, oracle and bound agree with arithmetic that they have no
    part in.
    """
    findings: list[Finding] = []
    if not trial.subject.backward:
        return findings
    for identity in _identities(trial):
        limit = identity.left.bound + identity.right.bound
        findings += _beyond(trial, identity, limit, "the bounds of their terms allow")
    return findings


def sharp_identities(trial: Trial) -> list[Finding]:
    """Each identity holds as closely as the roundings of a correct kernel let it.

    Where ``companions.is_valid``, for heads with a row that sees ``companions.FEWEST`` keys: with
    a single key dS is 0, and roundings of rounding errors are all there is.

    The spread of the difference is predicted from the roundings (``oracles.variance``), so it sees
    errors that all elements share and none shows: one in delta changes every key's dk a little, and
    their sum as a whole. The largest of c differences, in units of their spreads, stays below
    sqrt(2 (x + ln 2c)) with probability 1 - exp(-x); their mean square stays below the limit of
    ``companions.rms``.
    """
    problem = trial.problem
    if not trial.subject.backward or not is_valid(problem):
        return []
    if 0 in (problem.B, problem.M, problem.N):
        return []
    variance = trial.variances
    counted = variance.keys_seen.view(problem.B, problem.Hk, -1).amax(2) >= FEWEST
    # A row's errors reach all columns of a sum: neither rows nor columns alone are the samples.
    rows = int((variance.keys_seen > 0).sum())
    findings = []
    for identity in _identities(trial):
        spread = getattr(variance, identity.variance).sqrt()
        counts = counted if spread.ndim == 2 else counted.unsqueeze(2)
        spread = torch.where(counts, spread, torch.inf)
        columns = int(spread.isfinite().sum())
        if not columns:
            continue
        most = math.sqrt(2 * SLACK * (RARE + math.log(2 * columns)))
        found = _beyond(trial, identity, most * spread, "roundings explain")
        mean = float((identity.error / spread).square().sum()) / columns
        limit = mean_square_limit(1 / (1 / columns + 1 / rows))
        if not found and not mean <= limit:
            found = [_mean_finding(trial, identity, mean, limit, columns)]
        findings += found
    return findings


def _identities(trial: Trial) -> list[_Identity]:
    """The sums of a trial. Rows and keys that no visible pair touches may hold NaN: left out."""
    got, bound = trial.got, trial.judgement.bound
    live = (trial.want.lse > -math.inf).unsqueeze(3)
    used = (bound.dv > 0).any(3, keepdim=True)
    q, k, v, dout = (
        torch.where(valid, x.to(torch.float64), 0.0)
        for valid, x in zip((live, used, used, live), trial.inputs, strict=True)
    )
    B, Hk, _, D = k.shape
    no_sum = _Sum(k.new_zeros(B, Hk, D), k.new_zeros(B, Hk, D))
    return [
        _Identity("sum_n dk = 0", "dk", "sum_dk", _sum(got.dk, bound.dk, Hk), no_sum),
        _Identity(
            "sum_n dv = sum_m dout",
            *("dv", "sum_dv"),
            _sum(got.dv, bound.dv, Hk),
            _sum(dout, torch.zeros_like(dout), Hk),
        ),
        _Identity(
            "sum q.dq = sum k.dk",
            *("dq", "q_dq"),
            _sum(got.dq, bound.dq, Hk, times=q),
            _sum(got.dk, bound.dk, Hk, times=k),
        ),
        _Identity(
            "sum v.dv = sum out.dout",
            *("dv", "v_dv"),
            _sum(got.dv, bound.dv, Hk, times=v),
            _sum(got.out, bound.out, Hk, times=dout),
        ),
    ]


def _sum(
    x: torch.Tensor | None, bound: torch.Tensor, Hk: int, times: torch.Tensor | None = None
) -> _Sum:
    """Sum of x, or of the dot with ``times``, over all rows of a key/value head's group."""
    assert x is not None
    B, heads, length, columns = x.shape
    rows = heads // Hk * length
    terms, bounds = x.to(torch.float64), bound
    if times is not None:
        terms, bounds = terms * times, bounds * times.abs()
    terms, bounds = (y.reshape(B, Hk, rows, columns) for y in (terms, bounds))
    axes = (2,) if times is None else (2, 3)
    additions = rows if times is None else rows * columns
    own = _ROUNDOFF * additions * terms.abs().sum(axes)
    return _Sum(terms.sum(axes), bounds.sum(axes) + own)


def _beyond(trial: Trial, identity: _Identity, limit: torch.Tensor, allowed: str) -> list[Finding]:
    """A finding where the two sums differ by more than ``limit``; NaN does."""
    error = identity.error
    bad = ~(error <= limit)
    if not bad.any():
        return []
    ratio = torch.where(bad, error / limit, -torch.inf).nan_to_num(nan=torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), bad.shape))
    return [
        Finding(
            guarantee="identities",
            claim=f"breaks {identity.claim} by more than {allowed}",
            subject=trial.subject.name,
            output=identity.output,
            where=" ".join(f"{axis}={i}" for axis, i in zip("bhd", index, strict=False)),
            got=float(identity.left.value[index]),
            want=float(identity.right.value[index]),
            bound=float(limit[index]),
            bad=int(bad.sum()),
            total=bad.numel(),
            places="h is a key/value head",
            problem=trial.problem,
        )
    ]


def _mean_finding(
    trial: Trial, identity: _Identity, mean: float, limit: float, columns: int
) -> Finding:
    """A finding on all sums together."""
    return Finding(
        guarantee="identities",
        claim=f"breaks {identity.claim}: mean square in units of the predicted spread",
        subject=trial.subject.name,
        output=identity.output,
        where="all sums together",
        got=mean,
        want=1.0,
        bound=limit - 1,
        bad=columns,
        total=columns,
        places="none of them alone",
        problem=trial.problem,
    )
