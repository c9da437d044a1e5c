"""The error bound of dq, dk and dv before they are stored.

Axes: z is batch entry and key/value head, r a row of any of the group's query heads, n a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fa_verify.oracles.bounds.constants import Constants
from fa_verify.oracles.bounds.forward import Chunk, Forward, add_of_operands, added_up
from fa_verify.oracles.bounds.replay import (
    SEGMENT,
    Format,
    additions,
    cast_format,
    lost_of_running,
    running_sums,
)
from fa_verify.oracles.outputs import Numerics

__all__ = [
    "QUERY_TILE",
    "Backward",
    "KeySums",
    "Read",
    "ScoreGradient",
    "Terms",
    "add_keys",
    "backward_error",
    "read_of",
    "score_gradient",
    "terms_of",
]

QUERY_TILE = 16  # a key's chain of additions counts rows by tiles of this height


class KeySums(NamedTuple):
    """Contributions of rows to the sums of keys, (Z, N, D or Dv); they add up over chunks."""

    dk: torch.Tensor
    dk_errors: torch.Tensor  # t W'|Q|
    dk_products: torch.Tensor  # t (|dS| + e)'|Q|
    dv: torch.Tensor
    dv_errors: torch.Tensor
    dv_products: torch.Tensor  # (p exp(F))'|dout|
    query_tiles: torch.Tensor  # (Z, N): tiles of rows that see the key
    # As returned by ``running_sums``; None where rows may be added in any order.
    dk_running: torch.Tensor | None
    dv_running: torch.Tensor | None
    additions: float  # the number of additions of rows


def add_keys(sums: KeySums | None, part: KeySums, x: Chunk) -> KeySums:
    """Returns the sums of earlier chunks and of chunk x; ``sums`` is changed, or None at first.

    Args:
        sums: The sums of all keys.
        part: The sums of the keys of x.
        x: The chunk.
    """
    if sums is not None:
        for value, running in ((sums.dk, sums.dk_running), (sums.dv, sums.dv_running)):
            if running is not None:
                # These rows add zeros to the sums of other keys.
                for others in (slice(x.keys.start), slice(x.keys.stop, None)):
                    running[:, others].add_(value[:, others].abs(), alpha=part.additions)
    totals = sums or (None,) * len(part)
    added: list[Any] = [
        None if of_part is None else added_up(total, of_part, 1, x.around)
        for total, of_part in zip(totals[:-1], part[:-1], strict=True)
    ]
    added.append(part.additions + (sums.additions if sums else 0.0))
    return KeySums(*added)


class Read(NamedTuple):
    """The results of a forward pass that the backward starts from, with their largest errors.

    ``read_of`` returns the true results. ``given_forward`` replaces them by the results that a
    kernel returned, which have no error.
    """

    p: torch.Tensor  # (Z, R, N): exp(s - lse), 0 on hidden pairs
    exponent_error: torch.Tensor  # F, (Z, R, N): of the exponent of the recomputed P
    out: torch.Tensor  # (Z, R, Dv)
    out_bound: torch.Tensor
    tiles: torch.Tensor  # T, as in ``Scores``, like slope and slope_error
    slope: torch.Tensor | None
    slope_error: torch.Tensor | None
    dlse_roundings: int  # of the gradient of lse, until it is subtracted


class ScoreGradient(NamedTuple):
    """dS by the scores after a softcap, and its components, (Z, R, N); 0 on hidden pairs."""

    ds: torch.Tensor
    error: torch.Tensor  # e
    p: torch.Tensor
    dp_reach: torch.Tensor  # |dout|.|v|
    delta_terms: torch.Tensor  # |dout|.|out| + |dlse|, (Z, R, 1)
    p_growth: torch.Tensor  # p expm1(F)
    p_grown: torch.Tensor  # p exp(F)

    @property
    def terms(self) -> torch.Tensor:
        """Returns the sum of |terms| of dS."""
        return self.p * (self.dp_reach + self.delta_terms)


class _ScoreGrads(NamedTuple):
    """dS by the scores before a softcap, and its errors, (Z, R, N); 0 on hidden pairs."""

    ds: torch.Tensor
    abs_ds: torch.Tensor
    error: torch.Tensor  # e, before its cast
    reach: torch.Tensor  # |dS| + e, the largest |dS| that a correct kernel has
    capped: ScoreGradient  # dS by the scores after the softcap


class Backward(NamedTuple):
    """True values and bounds of the backward pass of a chunk."""

    dq: torch.Tensor  # (Z, R, D)
    dq_bound: torch.Tensor
    dq_products: torch.Tensor  # t (|dS| + e)|K|
    tiles: torch.Tensor  # T, (Z, R)
    keys: KeySums
    grads: _ScoreGrads


class Terms(NamedTuple):
    """Sums of |terms| of a chunk's gradients, with those of keys shaped as in ``KeySums``."""

    dq: torch.Tensor
    dq_reach: torch.Tensor  # |dS||K|
    dk: torch.Tensor
    dk_reach: torch.Tensor  # |dS|'|Q|
    dv: torch.Tensor


def read_of(fwd: Forward, c: Constants) -> Read:
    """Returns the true results of the forward pass, with F = E + B_lse + 3u (|s| + |L|) + u_exp."""
    scores = fwd.scores
    per_row = torch.add(fwd.lse_bound, scores.lse.abs(), alpha=3 * c.u).add_(c.u_exp)
    exponent_error = torch.add(scores.error, scores.size, alpha=3 * c.u)
    exponent_error += per_row.unsqueeze(2)
    return Read(
        scores.p, exponent_error, fwd.out, fwd.out_bound, scores.tiles, scores.slope,
        scores.slope_error, dlse_roundings=1,
    )  # fmt: skip


def score_gradient(x: Chunk, read: Read, c: Constants, p_rounded: bool) -> ScoreGradient:
    """Returns dS = p (dP - D) and the bound of its error before casts.

    Args:
        x: The chunk.
        read: The results of its forward pass.
        c: The constants of the bound.
        p_rounded: Whether dS is computed from P after its cast.
    """
    p, out, columns = read.p, read.out, x.v.shape[2]
    # 1. dP and its reach.
    dp = (x.dout @ x.v.mT).masked_fill_(x.hidden, 0.0)
    dp_reach = (x.abs_dout @ x.abs_v.mT).masked_fill_(x.hidden, 0.0)
    # 2. delta and its error: the kernel computes it from the stored out.
    products = x.stored_dout * out
    delta, delta_terms = (y.sum(2, keepdim=True) for y in (products, products.abs()))
    out_error = (x.stored_dout.abs() * read.out_bound).sum(2, keepdim=True)
    delta_error = out_error.add(delta_terms + out_error, alpha=c.gamma(float(columns + 4)))
    if c.eta_op:
        # Flushes of each product, each sum, and either operand of a product.
        operands = x.stored_dout.abs() + out.abs() + read.out_bound
        delta_error += c.eta_op * (2 * columns + operands.sum(2, keepdim=True))
    if x.dlse is not None:
        # One more subtraction: flushes of its operand and its result.
        dlse = x.dlse.unsqueeze(2)
        abs_dlse = dlse.abs()
        delta -= dlse
        delta_terms += abs_dlse
        delta_error.add_(delta.abs().add_(abs_dlse, alpha=read.dlse_roundings), alpha=c.u)
        delta_error += 2 * c.eta_op
    # 3. P, recomputed from the stored LSE.
    p_growth = read.exponent_error.expm1().mul_(p)
    p_grown = p + p_growth
    # 4. dS, its error e before the cast, and W after it.
    gap = dp - delta
    ds = p * gap
    abs_dp, abs_delta, grown = dp.abs_(), delta.abs(), 1 + 3 * c.u
    # A + dD + 3u (|dP| + |D| + A + dD), where A is the error of dP and dD that of delta.
    gap_error = add_of_operands(
        dp_reach * (c.short_dot(columns) * grown), x.abs_dout, x.abs_v, c.eta_dot * grown
    )
    gap_error.add_(abs_dp, alpha=3 * c.u)
    gap_error.add_((delta_error + c.eta_op) * grown + 3 * c.u * abs_delta)
    e = gap_error * p_grown
    e.addcmul_(p_growth, gap.abs_()).add_(abs_dp, alpha=c.ftz).add_(c.ftz * (1 + abs_delta))
    if p_rounded:
        e.addcmul_(p_grown * c.u_p + c.eta_p, gap_error.add_(gap))
    e.masked_fill_(x.hidden, 0.0)
    return ScoreGradient(ds, e, p, dp_reach, delta_terms, p_growth, p_grown)


def _score_grads(x: Chunk, read: Read, c: Constants, p_rounded: bool) -> _ScoreGrads:
    """Multiplies ``score_gradient`` by the slope f of a softcap."""
    capped = score_gradient(x, read, c, p_rounded)
    ds, e = capped.ds, capped.error
    if read.slope is not None and read.slope_error is not None:
        # The gradient by the scaled dots, before the softcap.
        grown = read.slope + read.slope_error
        e = e * grown * (1 + c.u) + ds.abs() * (read.slope_error + c.u * grown) + c.ftz
        ds = ds * read.slope
        e.masked_fill_(x.hidden, 0.0)
    abs_ds = ds.abs()
    return _ScoreGrads(ds, abs_ds, e, abs_ds + e, capped)


class _Operands(NamedTuple):
    """dS and the recomputed P as operands of dots, and their errors."""

    ds: torch.Tensor
    p: torch.Tensor
    ds_errors: torch.Tensor  # W
    p_errors: torch.Tensor


def _bounded(x: Chunk, grads: _ScoreGrads, t: float, c: Constants, scaled: bool) -> _Operands:
    """Returns the operands with bounds of their casts."""
    of = grads.capped
    # dS loses eta if it underflows, or eta / scale if it is scaled before its cast.
    lost = (c.eta_p + c.eta_op) * (1 + c.u_x) * (max(1.0, 1 / t) if scaled else 1.0)
    ds_errors = torch.add(grads.error, grads.reach, alpha=c.u_cast).add_(lost)
    p_errors = torch.add(of.p_growth, of.p_grown, alpha=c.u_cast)
    p_errors += (c.eta_p + c.ftz) * (1 + c.u_x)
    for errors in (ds_errors, p_errors):
        errors.masked_fill_(x.hidden, 0.0)
    return _Operands(grads.ds, of.p, ds_errors, p_errors)


def _replayed(
    x: Chunk, grads: _ScoreGrads, t: float, c: Constants, scaled: bool, cast: Format
) -> _Operands:
    """Returns the operands with their casts replayed, both at once."""
    ds, errors = grads.ds, grads.error
    if scaled:
        errors = (errors + 2 * c.u * grads.reach).add_(c.eta_op / min(t, 1.0)).mul_(t)
        ds = ds * t
    both, errors = cast.operand(
        torch.stack([ds, grads.capped.p]),
        torch.stack([errors, grads.capped.p_growth + c.ftz]), c.eta_a,
    )  # fmt: skip
    errors.masked_fill_(x.hidden, 0.0)
    if scaled:
        for y in (both, errors):
            y[0].div_(t)
    return _Operands(*both, *errors)


def backward_error(
    x: Chunk,
    read: Read,
    *,
    sm_scale: float,
    c: Constants,
    numerics: Numerics,
    in_dtype: str | None = None,
    before: KeySums | None = None,
) -> Backward:
    """Returns dq, dk, dv of a chunk, and their bounds before the last rounding.

    F is the error of the recomputed P's exponent, A the error of dP, and dD the error of delta::

        e  = p [expm1(F) |dP - D| + exp(F) (A + dD + 3u (|dP| + |D| + A + dD))]
             + FTZ (1 + |dP| + |D|)
        e += (up p exp(F) + eta) (|dP - D| + A + dD + 3u (...))    if dS comes from the rounded P
        e  = (e (1 + u) + u |dS|)(f + df) + |dS| df + FTZ    if a softcap multiplies dS by f
        W  = e + uc (|dS| + e) + eta (1 + u_x)
        dq: t [W|K| + g (1 + uc) (|dS| + e)|K|]
        dk: t [W'|Q| + g (1 + uc) (|dS| + e)'|Q|]
        dv: (p expm1(F) + uc p exp(F) + (eta + FTZ)(1 + u_x))'|dout| + g (1 + uc) (p exp F)'|dout|

    A subnormal operand of a dot adds eta_x. A kernel that flushes loses FTZ with each
    sum, product and operand of a product of delta, and with dP - D. It loses as much with dS times
    a scale and with each tile added to dq, dk or dv. Atomics lose 2 FTZ with each tile of a sum.
    For dk and dv, the caller adds the g terms and what flushes and atomics lose, which depend on
    the number of rows that see a key.

    With ``in_dtype``, casts to 16 bits and to TF32 are replayed: dS and P are the middle of what
    dS - e and dS + e are rounded to, and W is half the distance. A cast dS or P that may be
    subnormal adds eta_a. The g terms of sums over
    consecutive tiles are also bounded by their running sums.

    Args:
        x: The chunk.
        read: The results of its forward pass.
        sm_scale: Factor on q.k.
        c: The constants of the bound.
        numerics: The subject's declared numerics.
        in_dtype: The dtype of the inputs, if roundings are replayed.
        before: The sums of earlier rows over all keys, if any.

    Source: the steps of FlashAttention-2 (arXiv:2307.08691), algorithm 2.
    """
    cast = cast_format(in_dtype, numerics) if in_dtype is not None else None
    grads = _score_grads(x, read, c, numerics.ds_from == "rounded")
    ds, p, ds_errors, p_errors = (
        _bounded(x, grads, sm_scale, c, numerics.ds_scaled) if cast is None
        else _replayed(x, grads, sm_scale, c, numerics.ds_scaled, cast)
    )  # fmt: skip
    p_grown = grads.capped.p_grown
    # The dot of the other operand's gradient reads a prescaled operand again, still rounded. Its
    # underflow does not scale with its size: eta per product.
    again_q = c.u_in if numerics.prescales in ("q", "qk") else 0.0
    again_k = c.u_in if numerics.prescales in ("k", "qk") else 0.0
    tiles = read.tiles
    per_product = c.g((numerics.block_n + 2) * tiles) * (1 + c.u_cast)
    dq, dq_errors, dq_size = ds @ x.k, ds_errors @ x.abs_k, grads.reach @ x.abs_k
    dq_added = per_product.unsqueeze(2) * dq_size
    in_order = in_dtype is not None and not x.any_order and numerics.block_n <= SEGMENT
    if in_order and "dq" not in numerics.atomic:
        lost_in_order = lost_of_running(
            dq, running_sums(ds, x.k, numerics.block_n, zeros=x.around[1]), dq_errors, dq_size,
            count=additions(ds.shape[2] + sum(x.around), numerics.block_n),
            tile=numerics.block_n, hu=c.h * c.u,
        )  # fmt: skip
        dq_added = torch.minimum(dq_added, lost_in_order.mul_(1 + c.u_cast))
    dq_bound = (dq_errors + dq_added).add_(dq_size, alpha=again_k).mul_(sm_scale)
    dk_weights = ds_errors + again_q * grads.reach if again_q else ds_errors
    dk_errors = (dk_weights.mT @ x.abs_q).mul_(sm_scale)
    dv_errors = p_errors.mT @ x.abs_dout
    # Each sum of tiles may be flushed, before or after it is scaled; atomics also flush addends.
    lost_sum = max(1.0, sm_scale) * (c.eta_op + (2 * c.ftz if "dq" in numerics.atomic else 0.0))
    if lost_sum:
        dq_bound += (lost_sum * tiles + c.eta_op).unsqueeze(2)
    # Subnormal k, q and dout lose digits as operands of the last dots.
    eta_again = c.eta_prescaled(numerics.prescales, sm_scale)
    lost = sm_scale * c.eta_dot
    lost_k, lost_q = (lost + eta_again if again else lost for again in (again_k, again_q))
    if lost_k:
        dq_bound.add_(grads.reach.sum(2, keepdim=True), alpha=lost_k)
    if lost_q:
        dk_errors.add_(grads.reach.sum(1).unsqueeze(2), alpha=lost_q)
    if c.eta_dot:
        dv_errors.add_(p_grown.sum(1).unsqueeze(2), alpha=c.eta_dot)
    dk_running = dv_running = None
    # A group's heads may be summed in any order.
    if in_order and x.one_head:
        dk_running, dv_running = (
            None if name in numerics.atomic
            else running_sums(
                weights.mT, y, QUERY_TILE, None if earlier is None else earlier[:, x.keys]
            )
            for name, weights, y, earlier in (
                ("dk", ds, x.q * sm_scale, before and before.dk),
                ("dv", p, x.dout, before and before.dv),
            )
        )  # fmt: skip
    return Backward(
        dq=dq.mul_(sm_scale),
        dq_bound=dq_bound,
        dq_products=dq_size * sm_scale,
        tiles=tiles,
        keys=KeySums(
            dk=(ds.mT @ x.q).mul_(sm_scale),
            dk_errors=dk_errors,
            dk_products=(grads.reach.mT @ x.abs_q).mul_(sm_scale),
            dv=p.mT @ x.dout,
            dv_errors=dv_errors,
            dv_products=p_grown.mT @ x.abs_dout,
            query_tiles=x.query_tiles,
            dk_running=dk_running,
            dv_running=dv_running,
            additions=additions(x.q.shape[1], QUERY_TILE),
        ),
        grads=grads,
    )


def terms_of(x: Chunk, read: Read, grads: _ScoreGrads, sm_scale: float, slope_from: str) -> Terms:
    """Returns the sums of |terms| of the gradients of a chunk; 1 and tanh**2 are those of a slope.

    An exact slope, by ``Numerics.softcap_slope``, has one term.
    """
    ds_terms = grads.capped.terms
    if read.slope is not None:
        ds_terms *= read.slope if slope_from == "exact" else 2 - read.slope
    return Terms(
        dq=(ds_terms @ x.abs_k).mul_(sm_scale),
        dq_reach=grads.abs_ds @ x.abs_k,
        dk=(ds_terms.mT @ x.abs_q).mul_(sm_scale),
        dk_reach=grads.abs_ds.mT @ x.abs_q,
        dv=read.p.mT @ x.abs_dout,
    )
