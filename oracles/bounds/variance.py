"""The variance of each error of a correct kernel, under independent roundings.

The bound of ``error_model`` assumes that all roundings err by the most in one direction. A fault
below the bound, such as one rounding too many, still shows in the mean square of many errors.

Axes: b, h as in the inputs (k and v repeated for their group), m a row of the chunk, n a key.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.forward import added_up
from fa_verify.oracles.bounds.replay import power_of_two
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.score_mods import Additions
from fa_verify.oracles.reference.softcap import capped, slope
from fa_verify.oracles.reference.torch_reference import (
    DenseMask,
    RowMasks,
    chunk_height,
    row_chunks,
    sinks_of_rows,
)

__all__ = ["Variances", "rounding", "variances"]


# Roundings of a score from tanh and the products before and after it.
_CAPPING = 8


class Variances(NamedTuple):
    """Float64 predictions for one problem; 0 where a kernel's result is exact.

    sum_dk and sum_dv are variances of sums that are known in exact arithmetic, per key/value head
    and summed over its group of query heads.
    """

    out: torch.Tensor  # (B, H, M, Dv)
    dq: torch.Tensor  # (B, H, M, D)
    dk: torch.Tensor  # (B, Hk, N, D)
    dv: torch.Tensor  # (B, Hk, N, Dv)
    keys_seen: torch.Tensor  # (B, H, M): number of keys that a row sees
    rows_seen: torch.Tensor  # (B, Hk, N): number of rows of the group's heads that see a key
    sum_dk: torch.Tensor  # (B, Hk, D): variance of sum_n dk, which is exactly 0
    sum_dv: torch.Tensor  # (B, Hk, Dv): variance of sum_n dv, which is exactly the sum of dout


class _Sums(NamedTuple):
    """Contributions of a chunk's rows to sums over all rows, per query head."""

    dk: torch.Tensor  # values, (B, H, N, D)
    dv: torch.Tensor
    dk_errors: torch.Tensor  # variances before the gradient is stored
    dv_errors: torch.Tensor
    rows_seen: torch.Tensor  # (B, H, N)
    sum_dk: torch.Tensor  # (B, H, D)
    sum_dv: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """A few rows of every head, with all keys; rows and keys without a visible pair are 0."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None  # (B, H, m, 1)
    seen: torch.Tensor
    live: torch.Tensor  # (B, H, m, 1)
    sink: torch.Tensor | None  # (B, H, m, 1), -inf without one


@dataclass(frozen=True)
class _Forward:
    """P, its variances and the output of a chunk."""

    p: torch.Tensor
    p_cast: torch.Tensor  # variance of the cast P, relative to the softmax's sum
    p_scores: torch.Tensor  # variance from the errors of the scores
    lse: torch.Tensor  # variance of the log-sum-exp, (B, H, m, 1)
    out: torch.Tensor
    out_errors: torch.Tensor
    slope: torch.Tensor | None  # d(score)/d(t q.k); None if it is 1 everywhere


def rounding(x: torch.Tensor, u: float, eta: float) -> torch.Tensor:
    """Returns the variance of rounding float64 values to nearest: the squared spacing over 12.

    Averaged over a binade it is u**2 x**2 / 6. Zeros are exact.

    Args:
        x: Values, float64, any shape.
        u: Unit roundoff of the format.
        eta: Half the spacing of the format's subnormal numbers.
    """
    # Half a spacing, over the root of 3.
    deviation = power_of_two(x).mul_(u / 3**0.5).clamp_(min=eta / 3**0.5)
    return deviation.square_().masked_fill_(x == 0, 0.0)


def _cast(x: torch.Tensor, c: Constants, numerics: Numerics, scale: float = 1.0) -> torch.Tensor:
    """Returns the variance of the casts of P or dS, which are cast in units of 1 / scale."""
    variance = rounding(x if scale == 1.0 else x * scale, c.u_p, c.eta_p)
    factor = numerics.ds_roundings / scale**2
    return variance if factor == 1.0 else variance.mul_(factor)


def _gather(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    seen: torch.Tensor,
    sink: torch.Tensor | None,
) -> _Chunk:
    """Returns the inputs of a chunk in float64, with zeros in dead rows and unseen keys."""
    B, H, M, _ = q.shape
    seen = seen.expand(B, H, M, k.shape[2])
    live, used = seen.any(3, keepdim=True), seen.any(2).unsqueeze(3)
    q, dout = (torch.where(live, x.to(torch.float64), 0.0) for x in (q, dout))
    k, v = (torch.where(used, x.to(torch.float64), 0.0) for x in (k, v))
    if dlse is not None:
        dlse = torch.where(live, dlse.to(torch.float64).unsqueeze(3), 0.0)
    return _Chunk(q, k, v, dout, dlse, seen, live, None if sink is None else sink.unsqueeze(3))


def _prescaling(c: Constants, numerics: Numerics) -> tuple[float, float]:
    """Returns the relative variances of q and k from prescaling.

    The factor is not declared, so they are the largest variances of a rounding.
    """
    each = c.u_in**2 / 3
    return each * (numerics.prescales in ("q", "qk")), each * (numerics.prescales in ("k", "qk"))


def _forward(
    x: _Chunk,
    t: float,
    c: Constants,
    numerics: Numerics,
    softcap: float | None,
    added: tuple[torch.Tensor, ...],
) -> _Forward:
    """Returns the forward pass of a chunk and the variances of P and out."""
    s, by_dot = (x.q * t) @ x.k.mT, None
    if softcap is not None:
        s, by_dot = capped(s, softcap), slope(s, softcap)
    added = tuple(torch.where(x.seen, term, 0.0) for term in added)
    parts = sum(map(torch.abs, added), s.abs()) if added else None
    s = torch.where(x.seen, sum(added, s), -math.inf)
    m = torch.where(x.live, s.amax(3, keepdim=True), 0.0)
    of_sink = torch.zeros_like(m)
    if x.sink is not None:
        m = torch.where(x.live, torch.maximum(m, x.sink), m)
        of_sink = torch.where(x.live, (x.sink - m).exp(), 0.0)
    below = s - m
    e = below.exp()
    total = torch.where(x.live, e.sum(3, keepdim=True) + of_sink, 1.0)
    p = e / total
    # 1. Scores: the scaling, the subtraction of the maximum, the dot, a prescaled operand.
    per_product = x.q.shape[3] * c.u**2 / 3 + sum(_prescaling(c, numerics))
    scores = (x.q.square() * (per_product * t**2)) @ x.k.square().mT
    if by_dot is not None:
        scores *= by_dot**2
        scores += (s * (_CAPPING * c.u)).square()
    if parts is not None:
        scores += (parts * c.u).square()
    scores.addcmul_(s, s, value=c.u**2).addcmul_(below, below, value=c.u**2)
    # A hidden pair has an infinite score here.
    p_scores = p.square() * torch.where(x.seen, scores, 0.0)
    # 2. The cast of P, which is relative to the row maximum unless P is normalised first. The
    #    maximum itself is then 1, which is exact.
    if numerics.p_normalised:
        p_cast = _cast(p, c, numerics)
    else:
        p_cast = _cast(torch.where(e == 1, 0.0, e), c, numerics).div_(total.square())
    # 3. out. Errors of the scores cancel in the softmax's sum to the extent that v equals out.
    #    Errors of the cast do so only if the sum is taken over the rounded P.
    out = p @ x.v
    centred, plain = p_scores, p_cast
    if numerics.l_from == "rounded":
        centred, plain = p_scores + p_cast, torch.zeros_like(p_cast)
    about_out = (centred @ x.v.square()) - 2 * out * (centred @ x.v)
    about_out += out.square() * centred.sum(3, keepdim=True)
    if x.sink is not None:
        # The sink is a key whose value is 0.
        error_sink = (x.sink * c.u).square() + ((x.sink - m) * c.u).square()
        p_sink = of_sink / total
        about_out += out.square() * torch.where(p_sink > 0, p_sink.square() * error_sink, 0.0)
    errors = about_out.clamp(min=0) + plain @ x.v.square() + rounding(out, c.u_in, c.eta_in)
    lse = m + total.log()
    lse_errors = (c.u * (1 + m.abs() + lse.abs())).square() + c.u_exp**2
    return _Forward(p, p_cast, p_scores, lse_errors, out, errors, by_dot)


def _backward(
    x: _Chunk, fwd: _Forward, t: float, c: Constants, numerics: Numerics
) -> tuple[torch.Tensor, _Sums]:
    """Returns the variance of a chunk's dq, and the contributions of its rows to sums."""
    p = p_dtanh = fwd.p
    # A product of a hidden pair may overflow. P and its variances are 0 there: gaps need no mask.
    dp = torch.where(x.seen, x.dout @ x.v.mT, 0.0)
    delta = (x.dout * fwd.out).sum(3, keepdim=True)
    if x.dlse is not None:
        delta = delta - x.dlse
    gap = dp - delta
    ds = p * gap
    # 1. delta reads the stored out. All keys of a row share the errors of out: the cast of P, and
    #    the last rounding.
    reach = gap if numerics.l_from == "rounded" else dp
    delta_errors = (fwd.p_cast * reach.square()).sum(3, keepdim=True)
    stored = rounding(fwd.out, c.u_in, c.eta_in)
    delta_errors += (x.dout.square() * stored).sum(3, keepdim=True)
    # 2. The casts of dS and of the recomputed P.
    if fwd.slope is not None:
        gap, ds, p_dtanh = gap * fwd.slope, ds * fwd.slope, p * fwd.slope
    ds_cast, p_cast = (
        _cast(ds, c, numerics, t if numerics.ds_scaled else 1.0),
        _cast(p, c, numerics),
    )
    gap2 = gap.square()
    ds_errors = torch.addcmul(ds_cast, fwd.p_scores, gap2)
    if numerics.ds_from == "rounded":
        ds_errors.addcmul_(p_cast, gap2)
    # 3. The gradients. The error of delta reaches all keys of the row through P. The dots of dq and
    #    dk read a prescaled operand again.
    q2, k2, dout2 = (y.square() for y in (x.q, x.k, x.dout))
    again_q, again_k = _prescaling(c, numerics)
    dq = ds @ x.k * t
    stored_dq = rounding(dq, c.u_in, c.eta_in)
    dq_errors = ds_errors @ k2 + delta_errors * (p_dtanh @ x.k).square()
    dk_errors = ds_errors.mT @ q2 + p_dtanh.square().mT @ (delta_errors * q2)
    if again_k:
        dq_errors += again_k * (ds.square() @ k2)
    if again_q:
        dk_errors += again_q * (ds.square().mT @ q2)
    # 4. The identities; see ``variances``.
    row_ds = ds_cast.sum(3, keepdim=True) + delta_errors
    row_p = p_cast.sum(3, keepdim=True) + fwd.lse
    sums = _Sums(
        dk=ds.mT @ x.q * t,
        dv=p.mT @ x.dout,
        dk_errors=dk_errors * t**2,
        dv_errors=p_cast.mT @ dout2 + fwd.p_scores.mT @ dout2,
        rows_seen=x.seen.sum(2),
        sum_dk=(q2 * row_ds).sum(2) * t**2,
        sum_dv=(dout2 * row_p).sum(2),
    )
    return dq_errors * t**2 + stored_dq, sums


def _finish(sums: _Sums, Hk: int, c: Constants, numerics: Numerics) -> tuple[torch.Tensor, ...]:
    """Sums the heads of each group, and adds the roundings of the stored dk and dv."""

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], Hk, -1, *x.shape[2:]).sum(2)

    def stored(gradient: torch.Tensor) -> torch.Tensor:
        total = rounding(grouped(gradient), c.u_in, c.eta_in)
        if numerics.group_sum == "dtype" and gradient.shape[1] > Hk:
            total += grouped(rounding(gradient, c.u_in, c.eta_in))
        return total

    rows_seen, stored_dk, stored_dv = grouped(sums.rows_seen), stored(sums.dk), stored(sums.dv)
    return (
        grouped(sums.dk_errors) + stored_dk,
        grouped(sums.dv_errors) + stored_dv,
        rows_seen,
        grouped(sums.sum_dk) + stored_dk.sum(2),
        grouped(sums.sum_dv) + stored_dv.sum(2),
    )


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Variances:
    """Returns ``Variances`` of zeros, float64."""
    (B, H, M, D), (Hk, N), Dv = q.shape, k.shape[1:3], v.shape[3]
    shapes = (
        *((B, H, M, Dv), (B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M), (B, Hk, N)),
        *((B, Hk, D), (B, Hk, Dv)),
    )
    return Variances(*(q.new_zeros(shape, dtype=torch.float64) for shape in shapes))


def variances(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    rows: int | None = None,
) -> Variances:
    """Returns the variances of the errors of a correct kernel's elements and of two identities.

    r(x) is the variance of rounding x, u = 2**-24, u_in is the unit roundoff of the inputs, e the
    weights before division by their sum l, dP = dout.v, D = sum(out dout), dS = p (dP - D)::

        var_s = (u s)^2 + (u (s - m))^2 + dim u^2/3 t^2 q^2.k^2 (+ u_in^2/3 t^2 q^2.k^2, prescaled)
        out   = sum r(e)/l^2 v^2 + sum p^2 var_s (v - out)^2 + r(out)
        var_D = sum r(e)/l^2 dP^2 + sum r(out) dout^2
        dS    = p^2 var_s (dP - D)^2 + r(dS)
        dq    = t^2 [var_dS k^2 + var_D (p k)^2] + r(dq)
        dk    = t^2 [var_dS' q^2 + (p^2 var_D)' q^2] + r(dk)
        dv    = (r(p) + p^2 var_s)' dout^2 + r(dv)

    A softcap multiplies dS and p in dq and dk by its slope, and the dot's terms of var_s by its
    square. It also adds (8u s)^2, and invalidates the first identity. Terms that are added to
    scores add u^2 (sum of |terms|)^2. A sink is one more key, with v = 0 and without the dot's
    terms; it invalidates both identities.

    The errors in the identities are not independent, so each variance is derived from the roundings
    instead of the elements' variances:

    * Errors of the scores that both passes share yield another softmax, for which both identities
      hold.
    * The error of sum_n dk is sum_m t q (sum_n error of dS's cast - error of D). As sum_n p = 1,
      the error of D counts in full: t^2 q^2 (sum_n r(dS) + var_D) + r(dk).
    * The error of sum_n dv is sum_m dout (sum_n error of P's cast + error of lse). The rounding of
      the stored lse scales a whole row, which only affects sums over the row:
      dout^2 (sum_n r(p) + var_lse) + r(dv).

    Args:
        q: (B, H, M, D), the kernel's inputs, any float dtype and strides.
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        dout: (B, H, M, Dv).
        dlse: (B, H, M), the gradient of lse; its rounding is negligible.
        alibi_slopes: As in ``reference.attention``.
        bias: As in ``reference.attention``.
        sinks: As in ``reference.attention``.
        mask: The mask. Padding may hold anything.
        sm_scale: Factor on q.k.
        in_dtype: "fp16", "bf16", "fp32" or "fp64": the dtype the kernel reads and writes.
        numerics: The subject's declared numerics. The model excludes TF32 and the accumulator's h.
        softcap: As in ``reference.attention``.
        rows: Height of a chunk, more where its rows see few keys; None keeps a chunk's scores
            within 2**24.

    Returns:
        Float64 tensors on q's device.

    Raises:
        ValueError: in_dtype is unknown or rows is less than 1.

    Source: first-order propagation of independent errors through FlashAttention-2
    (arXiv:2307.08691), algorithms 1 and 2.
    """
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    result = _nothing(q, k, v)
    if 0 in (B, M, N):
        return result
    # The roundings of P and dS are counted one by one below.
    c = constants(in_dtype, dataclasses.replace(numerics, ds_roundings=1))
    k_of_heads, v_of_heads = (x.repeat_interleave(H // Hk, dim=1) for x in (k, v))
    masks = RowMasks(mask, B, H, M, N, q.device)
    additions = Additions(mask, (B, H, M, N), q.device, alibi_slopes, bias)
    sums: _Sums | None = None
    for here, keys in row_chunks(masks, chunk_height(rows, B, H, N)):
        seen = masks.between(here.start, here.stop, keys)
        added = additions.between(here.start, here.stop, keys)
        of_lse = None if dlse is None else dlse[:, :, here]
        sink = None if sinks is None else sinks_of_rows(sinks, mask, (B, H, M, N), here)
        x = _gather(
            q[:, :, here], k_of_heads[:, :, keys], v_of_heads[:, :, keys], dout[:, :, here],
            of_lse, seen, sink,
        )  # fmt: skip
        fwd = _forward(x, sm_scale, c, numerics, softcap, added)
        dq_errors, part = _backward(x, fwd, sm_scale, c, numerics)
        result.out[:, :, here] = fwd.out_errors
        result.dq[:, :, here] = dq_errors
        result.keys_seen[:, :, here] = x.seen.sum(3)
        around = keys.start, N - keys.stop
        columns = zip(_Sums._fields, sums or (None,) * len(part), part, strict=True)
        sums = _Sums(*(
            added_up(total, of_part, 2, (0, 0) if name in ("sum_dk", "sum_dv") else around)
            for name, total, of_part in columns
        ))  # fmt: skip
    assert sums is not None  # M > 0
    dk, dv, rows_seen, *identities = _finish(sums, Hk, c, numerics)
    return Variances(
        result.out, result.dq, dk, dv, result.keys_seen, rows_seen.to(torch.float64), *identities
    )
