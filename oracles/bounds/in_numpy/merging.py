"""Merged attention states and their bound in NumPy float64: second implementations, row by row.

The gradients are analytic. Suffixes of locals name axes: p part, d column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.units import Units, units_of
from fa_verify.oracles.outputs import Numerics

__all__ = ["NumpyMerged", "gradient_errors", "merge_bound", "merged"]

FloatArray = npt.NDArray[np.float64]


class NumpyMerged(NamedTuple):
    """A merge and its gradients, or their bounds: (B,H,M,Dv), (B,H,M) and, of parts, (P, ..)."""

    out: FloatArray
    lse: FloatArray
    douts: FloatArray
    dlses: FloatArray


class _Row(NamedTuple):
    """The merge of one row, over the parts that saw a key."""

    lse: float
    largest: float
    share_p: FloatArray
    out_d: FloatArray
    dots_p: FloatArray
    delta: float


def _row(out_pd: FloatArray, lse_p: FloatArray, dout_d: FloatArray) -> _Row:
    """Returns the passes of one row."""
    # 1: the logarithm of the sum, relative to the largest term
    largest = float(lse_p.max())
    lse = largest + float(np.log(np.exp(lse_p - largest).sum()))
    # 2: the average
    share_p = np.exp(lse_p - lse)
    share_p = share_p / share_p.sum()
    # 3: the gradient of the shares
    dots_p = out_pd @ dout_d
    return _Row(lse, largest, share_p, share_p @ out_pd, dots_p, float(share_p @ dots_p))


def merged(outs: FloatArray, lses: FloatArray, dout: FloatArray, dlse: FloatArray) -> NumpyMerged:
    """Merges attention states, and differentiates sum(out * dout) + sum(lse * dlse).

    Args:
        outs: (P, B, H, M, Dv) float64, with the values of the parts.
        lses: (P, B, H, M); -inf where a part saw no key.
        dout: (B, H, M, Dv).
        dlse: (B, H, M).

    Returns:
        The merge; 0 and -inf where no part saw a key, and gradients of 0 for parts that saw none.
    """
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    douts, dlses = np.zeros(outs.shape), np.zeros(lses.shape)
    for at in np.ndindex(lse.shape):
        seen = np.flatnonzero(lses[:, *at] != -np.inf)
        if not len(seen):
            continue
        row = _row(outs[seen, *at], lses[seen, *at], dout[at])
        out[at], lse[at] = row.out_d, row.lse
        for p, share, dot in zip(seen, row.share_p, row.dots_p, strict=True):
            douts[p, *at] = share * dout[at]
            dlses[p, *at] = share * (dot - row.delta + dlse[at])
    return NumpyMerged(out, lse, douts, dlses)


def _average_error(
    x_p: FloatArray,
    off_p: FloatArray,
    mean: float,
    row: _Row,
    error_p: FloatArray,
    units: Units,
) -> float:
    """Returns the error of a weighted mean of numbers that are off by ``off_p``."""
    n = len(x_p)
    # The smallest sum of weights, relative to the exact one.
    least = 1.0 + float((row.share_p * np.expm1(-error_p)).sum())
    total = 0.0
    for x, off, share, error in zip(x_p, off_p, row.share_p, error_p, strict=True):
        total += share * np.expm1(error) * abs(x - mean) / least
        total += share * np.exp(error) * (off + units.gamma(n) * (abs(x) + off)) / least
        total += units.flush * (abs(x) + off)
        total += _subnormal(units)
    # The sum of weights: its additions, its flushed weights, and the division.
    return float(total + (units.gamma(n + 3) + n * units.flush) * (abs(mean) + total))


def _subnormal(units: Units) -> float:
    """Returns the error of a product below the smallest normal number."""
    return max(units.u * units.flush, float(np.nextafter(0, 1))) + units.flush_op


def merge_bound(
    outs: FloatArray,
    lses: FloatArray,
    dout: FloatArray,
    dlse: FloatArray,
    *,
    in_dtype: str,
    numerics: Numerics | None = None,
    out_errors: FloatArray | None = None,
    lse_errors: FloatArray | None = None,
) -> NumpyMerged:
    """Returns the largest error of each element of ``merged``, of a correct kernel.

    Args:
        outs: (P, B, H, M, Dv) float64, with the values that the kernel was given.
        lses: (P, B, H, M).
        dout: (B, H, M, Dv).
        dlse: (B, H, M).
        in_dtype: The dtype of outs, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics.
        out_errors: As outs: the errors of computed parts; None is 0.
        lse_errors: As lses.

    Returns:
        Bounds; doubled for "fp64", because the reference has an error of the same size.
    """
    units = units_of(in_dtype, numerics or Numerics())
    is_cast = in_dtype in ("fp16", "bf16")
    times = 2.0 if in_dtype == "fp64" else 1.0
    off_out = np.zeros(outs.shape) if out_errors is None else out_errors
    off_lse = np.zeros(lses.shape) if lse_errors is None else lse_errors
    b_out, b_lse = np.zeros(outs.shape[1:]), np.zeros(lses.shape[1:])
    b_douts, b_dlses = np.zeros(outs.shape), np.zeros(lses.shape)

    def stored(value: float, bound: float) -> float:
        """Returns the bound with the cast to 16 bits."""
        if not is_cast:
            return bound
        return bound + units.u_stored * (abs(value) + bound) + units.eta_stored

    for at in np.ndindex(b_lse.shape):
        seen = np.flatnonzero(lses[:, *at] != -np.inf)
        n = len(seen)
        if not n:
            continue
        out_pd, lse_p, off_p, off_pd = (x[seen, *at] for x in (outs, lses, off_lse, off_out))
        row = _row(out_pd, lse_p, dout[at])
        # 1: exponents
        below_p = row.largest - lse_p + off_p.max() + off_p
        error_p = off_p + float(units.gamma(3)) * below_p + units.u_exp
        low = -float(np.log1p((row.share_p * np.expm1(-error_p)).sum()))
        high = float(np.log1p((row.share_p * np.expm1(error_p)).sum()))
        # 2: out, column by column, and lse
        for d in range(outs.shape[4]):
            mean = float(row.out_d[d])
            core = _average_error(out_pd[:, d], off_pd[:, d], mean, row, error_p, units)
            b_out[at][d] = stored(mean, core) + _subnormal(units)
        step = high + float(units.gamma(n)) + n * units.flush
        step += units.u_log * (1 + abs(row.lse - row.largest))
        b_lse[at] = step + units.u * (abs(row.lse) + step)
        # 3: the products of dout with each part, and their mean
        dout_d = np.abs(dout[at])
        dot_error_p = float(units.gamma(len(dout_d))) * ((np.abs(out_pd) + off_pd) @ dout_d)
        dot_error_p = dot_error_p + off_pd @ dout_d + len(dout_d) * _subnormal(units)
        delta_error = _average_error(row.dots_p, dot_error_p, row.delta, row, error_p, units)
        # 4: the gradients of each part
        for i, p in enumerate(seen):
            share = float(row.share_p[i])
            share_error = share * float(np.expm1(error_p[i] + low + float(units.gamma(n + 3))))
            share_error += (n + 1) * units.flush
            slope_error = dot_error_p[i] + delta_error
            sizes = abs(row.dots_p[i]) + abs(row.delta) + abs(dlse[at]) + slope_error
            slope_error += float(units.gamma(2)) * sizes
            slope = row.dots_p[i] - row.delta + dlse[at]
            bound = (share + share_error) * slope_error + share_error * abs(slope)
            b_dlses[p, *at] = bound + units.u * (abs(share * slope) + bound) + _subnormal(units)
            for d, size in enumerate(dout_d):
                bound = share_error * size
                bound += units.u * (share * size + bound) + _subnormal(units)
                b_douts[p, *at][d] = stored(share * size, bound)
    return NumpyMerged(*(times * x for x in (b_out, b_lse, b_douts, b_dlses)))


def gradient_errors(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    *,
    seen: npt.NDArray[np.bool_],
    sm_scale: float,
    off_dout: FloatArray,
    off_dlse: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns how far dq, dk and dv move if dout and dlse move by given amounts, pair by pair.

    Args:
        q: (B, H, M, D) float64.
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        seen: (B, H, M, N), True where a query sees a key.
        sm_scale: The factor on q.k, > 0.
        off_dout: (B, H, M, Dv), >= 0.
        off_dlse: (B, H, M), >= 0.
    """
    B, H, M, _ = q.shape
    group = H // k.shape[1]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h, m in np.ndindex(B, H, M):
        of_group = b, h // group
        keys = np.flatnonzero(seen[b, h, m])
        if not len(keys):
            continue
        scores_n = sm_scale * (k[of_group][keys] @ q[b, h, m])
        probs_n = np.exp(scores_n - scores_n.max())
        probs_n = probs_n / probs_n.sum()
        out_d = probs_n @ v[of_group][keys]
        for n, prob in zip(keys, probs_n, strict=True):
            apart_d = np.abs(v[of_group][n] - out_d)
            moved = prob * (float(apart_d @ off_dout[b, h, m]) + off_dlse[b, h, m])
            dq[b, h, m] += sm_scale * moved * np.abs(k[of_group][n])
            dk[of_group][n] += sm_scale * moved * np.abs(q[b, h, m])
            dv[of_group][n] += prob * off_dout[b, h, m]
    return dq, dk, dv
