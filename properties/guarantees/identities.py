"""Identities of a subject's own gradients, which hold in exact arithmetic without an oracle.

Per key/value head, summed over all keys n and all rows m of the group's heads::

    sum_n dk = 0              adding a vector to every key changes no weight
    sum_n dv = sum_m dout     the weights of a row sum to 1
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.guarantee import IDENTITIES
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.statistics import (
    FEWEST,
    RARE,
    SLACK,
    is_valid,
    mean_square_limit,
)
from fa_verify.properties.running.trial import AttentionTrial

__all__ = ["identities"]


class _Identity(NamedTuple):
    """One identity. All tensors have the shape (B, Hk, D or Dv).

    Args:
        claim: The identity, such as "sum_n dk = 0".
        output: The output that is summed.
        got: The sum over keys.
        want: Its expected value.
        spread: Predicted standard deviation of the difference; inf where there is no prediction.
        drift: Largest contribution of roundings that are not independent.
    """

    claim: str
    output: str
    got: torch.Tensor
    want: torch.Tensor
    spread: torch.Tensor
    drift: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """The absolute difference minus the drift, at least 0; NaN stays NaN."""
        return ((self.got - self.want).abs() - self.drift).clamp(min=0)


def identities(trial: AttentionTrial) -> list[Finding]:
    """Each identity holds within the error that independent roundings explain.

    Applies where ``statistics.is_valid``, to heads with a row that sees at least
    ``statistics.FEWEST`` keys. With a single key dS is 0, and dk consists of rounding errors only.

    The spread of the difference is predicted from the roundings (``bounds.variance``). The check
    detects errors that all elements share but that are too small in each: an error in delta changes
    the dk of every key a little and their sum a lot. The largest of c differences, in units of
    their spreads, stays below sqrt(2 (x + ln 2c)) with probability 1 - exp(-x). Their mean square
    stays below the limit of ``statistics.rms``.

    The gradient of a key that fewer than ``statistics.FEWEST`` rows see is a sum of a few products
    of numbers with few bits. Its last rounding may not be independent of the next key's: for
    example, multiplying by 1 - 2**-8 rounds every 8-bit number down. Each of these keys may
    therefore add u_in times its gradient as a one-sided error.
    """
    problem = trial.problem
    # With a gradient of lse, the sum of dS over keys is not 0. With a sink, neither identity holds.
    if not trial.subject.backward or not is_valid(problem) or trial.inputs.dlse is not None:
        return []
    if trial.inputs.sinks is not None or trial.subject.numerics_of(problem).rounded_sums:
        return []
    if 0 in (problem.B, problem.M, problem.N):
        return []
    # A row's errors affect all columns of a sum, so the samples are neither rows nor columns alone.
    rows = int((trial.variances.keys_seen > 0).sum())
    findings = []
    # sum_n dk = 0 does not hold with a softcap: its derivative differs between scores.
    for identity in _identities(trial)[0 if problem.softcap is None else 1 :]:
        columns = int(identity.spread.isfinite().sum())
        if not columns:
            continue
        found = _beyond(trial, identity, columns)
        # A column of zeros in dout or in q is summed without a rounding.
        share = torch.where(identity.error == 0, 0.0, identity.error / identity.spread)
        mean = float(share.square().sum()) / columns
        limit = mean_square_limit(1 / (1 / columns + 1 / rows))
        if not found and not mean <= limit:
            found = [_mean_finding(trial, identity, mean, limit, columns)]
        findings += found
    return findings


def _identities(trial: AttentionTrial) -> list[_Identity]:
    """Return the identities of a trial. Excludes rows that see no key, whose dout may be NaN."""
    problem, got, variance = trial.problem, trial.got, trial.variances
    B, Hk = problem.B, problem.Hk
    assert got.dk is not None
    assert got.dv is not None
    live = (trial.want.lse > -math.inf).unsqueeze(3)
    dout = torch.where(live, trial.inputs.dout.to(torch.float64), 0.0)
    sum_dout = dout.reshape(B, Hk, -1, problem.Dv).sum(2)
    counted = variance.keys_seen.view(B, Hk, -1).amax(2, keepdim=True) >= FEWEST
    u_in = constants(problem.dtype, trial.subject.numerics_of(problem)).u_in
    few = (variance.rows_seen < FEWEST).unsqueeze(3)

    def spread(of: torch.Tensor) -> torch.Tensor:
        return torch.where(counted, of.sqrt(), torch.inf)

    def drift(true: torch.Tensor) -> torch.Tensor:
        return u_in * (true.abs() * few).sum(2)

    sum_dk, sum_dv = (x.to(torch.float64).sum(2) for x in (got.dk, got.dv))
    return [
        _Identity(
            "sum_n dk = 0", "dk", sum_dk, torch.zeros_like(sum_dk),
            spread(variance.sum_dk), drift(trial.want.dk),
        ),
        _Identity(
            "sum_n dv = sum_m dout", "dv", sum_dv, sum_dout,
            spread(variance.sum_dv), drift(trial.want.dv),
        ),
    ]  # fmt: skip


def _beyond(trial: AttentionTrial, identity: _Identity, columns: int) -> list[Finding]:
    """Return a finding if a sum is NaN or exceeds the limit for the largest of all columns."""
    most = math.sqrt(2 * SLACK * (RARE + math.log(2 * columns)))
    limit = most * identity.spread
    bad = ~(identity.error <= limit)
    if not bad.any():
        return []
    ratio = torch.where(bad, identity.error / limit, -torch.inf).nan_to_num(nan=torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), bad.shape))
    return [
        Finding(
            guarantee=IDENTITIES,
            claim=f"breaks {identity.claim} by more than roundings explain",
            subject=trial.subject.name,
            output=identity.output,
            where=" ".join(f"{axis}={i}" for axis, i in zip("bhd", index, strict=True)),
            got=float(identity.got[index]),
            want=float(identity.want[index]),
            bound=float((limit + identity.drift)[index]),
            bad=int(bad.sum()),
            total=bad.numel(),
            places="h is a key/value head",
            problem=trial.problem,
            unit="sums",
        )
    ]


def _mean_finding(
    trial: AttentionTrial, identity: _Identity, mean: float, limit: float, columns: int
) -> Finding:
    """Return a finding about the mean square over all sums."""
    return Finding(
        guarantee=IDENTITIES,
        claim=f"breaks {identity.claim}: the mean square of error/spread is too large",
        subject=trial.subject.name,
        output=identity.output,
        where=f"mean over {columns} sums",
        got=mean,
        want=1.0,
        bound=limit - 1,
        bad=0,
        total=columns,
        places="no sum exceeds its limit alone",
        problem=trial.problem,
        unit="sums",
    )
