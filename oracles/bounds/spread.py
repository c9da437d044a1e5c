"""The random and the systematic errors of a correct kernel, of elements and of weighted sums.

The bound adds the largest error of every rounding. Most roundings are independent of each other, so
that their sum stays far below. Let every error before the last rounding be a sum of

* random errors, centred and independent, with variances that add up (sub-Gaussian: an error within
  a has a variance of at most a**2, a uniform one of a**2 / 3),
* shapes: errors in a known direction, such as that of a constant that is rounded once for all
  scores, whose factor is unknown but at most 1,
* one-sided errors, such as truncation, which add up.

With |x| <= DEVIATIONS sqrt(variance), an element errs by at most ::

    DEVIATIONS sqrt(variance) + sum of |shapes| + one-sided

with a probability of error of 2 exp(-DEVIATIONS**2 / 2) = 2e-20: 1e-9 for 5e10 elements. A sum of
errors, weighted by the true values of a row, a tile or all rows, obeys the same limit, with the
variances of its sources. It shows an output that is too large or too small by a small factor.

The sources are those of ``error_model`` and ``given_forward``. A dot of n products keeps a partial
sum T. In random order, its mean square is at most that of the terms plus the square of the sum::

    variance  (h u)**2 n (sum of |terms|**2 + sum**2)
    one-sided 2 h u (n / 16) (|sum| + 4 sqrt(sum of |terms|**2))    on tensor cores, which add 16
              products at a time, or 4 in TF32, and truncate
    shape     h u A (sum of the signs of the terms) on tensor cores, with A the larger of |sum| and
              sqrt(sum of |terms|**2)

The shape is the truncation of the products themselves, each of which loses half a spacing of A on
average. Where one product dominates, a score loses in proportion to the sum of all others: the
softmax is flatter by a factor.

Casts of P and dS in the backward are replayed. Those near a tie count as random, with half a
spacing. Those of the forward are relative to an unknown pivot, and uniform: u_p**2 / 3.

TF32 dots, whose conversion is declared, are those of the converted inputs. A conversion of P to
nearest is one more cast. A truncation loses a uniform share of the spacing, which is at most u_x p;
where P is 1 it loses nothing. Its mean is u_x p / 4 plus at most as much, which counts as a shape
where keys share it and as random, by the signs of v, where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch

from fa_verify.oracles.bounds.backward import QUERY_TILE
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import chunks
from fa_verify.oracles.bounds.forward import (
    Chunk,
    Forward,
    added_up,
    dot_error,
    forward_error,
    softmax_additions,
)
from fa_verify.oracles.bounds.given_forward import Returned
from fa_verify.oracles.bounds.replay import Format, cast_format, operand_format, stored_format
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import DenseMask

__all__ = ["DEVIATIONS", "Spread", "Weights", "spreads"]

DEVIATIONS = 9.6
_PAIRS = 2**22  # pairs of which some forty float64 matrices are in memory at a time
_SEEN = 2**28  # pairs of which booleans alone are
# Products that a tensor core adds at a time. An A100 adds 4 in TF32; more lose less.
_STEP = 16
_STEP_TF32 = 4
_PEAKED = 16.0  # least weight of other keys, in units of u_in, that spreads out over its spacing
_PEAK = 4.0  # largest partial sum of centred terms, in units of the root of their squares


class Weights(NamedTuple):
    """Weights of the errors in sums over a row or key: the true values, and 1 for lse."""

    out: torch.Tensor  # (B, H, M, Dv)
    dq: torch.Tensor  # (B, H, M, D)
    dk: torch.Tensor  # (B, Hk, N, D)
    dv: torch.Tensor  # (B, Hk, N, Dv)


class Spread(NamedTuple):
    """The errors of one output before its last rounding, float64.

    Args:
        value: The result without them, shaped as the output.
        variance: The variances of the random errors.
        shapes: (shapes, ...): errors up to a factor of at most 1.
        along: The largest one-sided error that may have the sign of the value everywhere,
            such as the truncation of a sum.
        across: The largest one-sided error whose sign differs from element to element.
        of_sums: The variance of the sum of random errors times weights over the last axis, without
            the errors of each element alone.
        shared: The part of it from sources that rows or keys share.
        alone: The variances of the errors of each element alone.
        peaked: (..., 1): whether weights near 1 make up nearly all of an element, so that it is
            nearly a value of v, or a sum of values of dout, and its last rounding is not uniform.
    """

    value: torch.Tensor
    variance: torch.Tensor
    shapes: torch.Tensor
    along: torch.Tensor
    across: torch.Tensor
    of_sums: torch.Tensor
    shared: torch.Tensor
    alone: torch.Tensor
    peaked: torch.Tensor

    @property
    def limit(self) -> torch.Tensor:
        """The largest error of each element before its last rounding."""
        one_sided = self.along + self.across
        return self.shapes.abs().sum(0) + one_sided + DEVIATIONS * self.variance.sqrt()


class _Dot(NamedTuple):
    """The errors of dots: random ones, and one-sided ones along the sum and across it."""

    variance: torch.Tensor
    along: torch.Tensor
    across: torch.Tensor

    @property
    def one_sided(self) -> torch.Tensor:
        return self.along + self.across


def _dot(
    value: torch.Tensor, squares: torch.Tensor, terms: torch.Tensor | float, c: Constants,
    step: int,
) -> _Dot:  # fmt: skip
    """Returns the errors of sums of products.

    Args:
        value: The sums.
        squares: The sums of the squares of their products.
        terms: The number of additions.
        c: The constants of the bound.
        step: Products that tensor cores add at a time, before they truncate; 0 without them.
    """
    hu = c.h * c.u
    variance = hu**2 * terms * (value.square() + squares)
    lost = 2 * hu * (terms / step + 1) if step else 0.0
    return _Dot(variance, lost * value.abs(), lost * _PEAK * squares.sqrt())


class _Keys(NamedTuple):
    """The contributions of a chunk's rows to dk or dv; they add up over chunks."""

    value: torch.Tensor  # (Z, N, D)
    squares: torch.Tensor  # the sum of the squares of terms
    variance: torch.Tensor
    shapes: torch.Tensor  # (shapes, Z, N, D)
    of_sums: torch.Tensor  # (Z, N)
    shared: torch.Tensor
    additions: torch.Tensor  # (Z, N, 1)
    flushed: torch.Tensor  # the loss of terms below the smallest normal number, (Z, N, D)
    weight: torch.Tensor  # the sum of P, (Z, N, 1)
    light: torch.Tensor  # the part of it from P < 1/2


class _Pairs(NamedTuple):
    """Quantities of pairs of rows and keys, (Z, R, N); 0 where hidden."""

    s: torch.Tensor
    sign: torch.Tensor  # the sign of s
    dot: _Dot  # the errors of the scores from their dots
    truncated: torch.Tensor  # the loss of the products of q and k on tensor cores


def _pairs(x: Chunk, s: torch.Tensor, t: float, c: Constants, step: int) -> _Pairs:
    squares = (x.q.square() @ x.k.square().mT).mul_(t * t).masked_fill_(x.hidden, 0.0)
    return _Pairs(
        s, s.sign(), _dot(s, squares, float(x.q.shape[2]), c, step),
        _of_products(s, squares, x.q, x.k, c, step),
    )  # fmt: skip


def _of_products(
    value: torch.Tensor, squares: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
    c: Constants, step: int,
) -> torch.Tensor:  # fmt: skip
    """Returns the mean of what tensor cores cut off the products of a sum, at most."""
    if not step:
        return torch.zeros_like(value)
    size = torch.maximum(value.abs(), squares.sqrt())
    return (left.sign() @ right.sign().mT).mul_(size).mul_(c.h * c.u)


def _of_lse(
    x: Chunk, fwd: Forward, pairs: _Pairs, systematic: torch.Tensor, cast: torch.Tensor,
    c: Constants, numerics: Numerics,
) -> Spread:  # fmt: skip
    """Returns the errors of lse, the logarithm of the softmax sum."""
    scores, p2 = fwd.scores, fwd.scores.p.square()
    # 1. Dots, and the casts of P where their sum is taken.
    variance = (p2 * pairs.dot.variance).sum(2)
    if numerics.l_from == "rounded":
        variance += cast.sum(2)
    # 2. Additions of the softmax sum, each of which errs by at most u of it, uniformly.
    variance += softmax_additions(x, scores, numerics) * (c.u**2 / 3)
    # 3. All else may have one sign: the exponents, the logarithm, and the maximum that it is added
    #    to.
    size = torch.maximum(scores.m.abs(), scores.lse.abs())
    along = (scores.p * (systematic + pairs.truncated.abs()).expm1_()).sum(2).log1p_()
    along += c.u_log * (1 + scores.log_l.abs() + scores.lag) + 4 * c.u * (size + scores.lag)
    value, variance, along = (
        y.masked_fill(x.empty, 0.0).unsqueeze(2) for y in (scores.lse, variance, along)
    )
    nothing = torch.zeros_like(value)
    return Spread(
        value=value, variance=variance, shapes=nothing.unsqueeze(0), along=along, across=nothing,
        of_sums=variance.squeeze(2), shared=nothing.squeeze(2), alone=nothing,
        peaked=torch.zeros_like(x.empty).unsqueeze(2),
    )  # fmt: skip


def _of_forward(
    x: Chunk, fwd: Forward, pairs: _Pairs, weights: torch.Tensor, t: float, c: Constants,
    numerics: Numerics, step: int,
) -> tuple[Spread, Spread]:  # fmt: skip
    """Returns the errors of out and of lse."""
    scores, out, v2, empty = fwd.scores, fwd.out, x.v.square(), x.empty.unsqueeze(2)
    p, p2, top = scores.p, scores.p.square(), (scores.m - scores.lse).exp().unsqueeze(2)
    # 1. Scores. E without the dots is an upper limit of everything else.
    dots = dot_error(x, scores.reach * t, t, c, "none")
    systematic = (scores.error - dots).clamp_(min=0).add_(pairs.dot.one_sided)
    systematic.masked_fill_(x.hidden, 0.0)
    centred = p2 * (pairs.dot.variance + systematic.square())
    # 2. The cast of P, relative to the row's maximum. A sum of the rounded P cancels it in part.
    lost = torch.full_like(scores.m, c.eta_p).unsqueeze(2)
    if not numerics.p_normalised:
        lost *= top
    cast = (p2 * c.u_p**2 + torch.where(x.seen, lost.square(), 0.0)) / 3
    of_lse = _of_lse(x, fwd, pairs, systematic, cast, c, numerics)
    lost_v = c.ftz * (x.seen.to(x.v.dtype) @ x.v.abs())
    if numerics.l_from == "rounded":
        centred, cast = centred + cast, torch.zeros_like(cast)
    # The conversion of P to TF32, after the sum of P. A truncation has a mean.
    truncates = c.u_x > 0 and numerics.tf32_conversion == "truncate"
    mean = c.u_x / 4 if truncates else 0.0
    cast = cast + p2 * (c.u_x**2 / 12 + mean**2 if truncates else c.u_x**2 / 3)
    variance = (centred @ v2) - 2 * out * (centred @ x.v) + out.square() * centred.sum(2, True)
    variance = variance.clamp_(min=0) + cast @ v2
    along_out, along_v = (weights * out).sum(2, True), weights @ x.v.mT
    of_sums = (centred * (along_v - along_out).square()).sum(2)
    of_sums += (cast * along_v.square()).sum(2)
    of_scores = p * systematic
    shapes = torch.stack([
        *(
            y @ x.v - out * y.sum(2, True)
            for y in (of_scores, of_scores * pairs.sign, p * pairs.truncated)
        ),
        mean * out,
    ])  # fmt: skip
    # 3. The sums of P v and of P.
    additions = ((numerics.block_n + 2) * scores.tiles).unsqueeze(2)
    dot = _dot(out, p2 @ v2, additions, c, step)
    of_l = c.u**2 * (additions + 2 * scores.tiles.unsqueeze(2) + 16)
    of_out = Spread(
        value=out * (1 - mean),
        variance=variance + dot.variance + of_l * out.square(),
        shapes=shapes,
        along=(dot.along + lost_v + c.ftz * (2 + scores.tiles).unsqueeze(2)).masked_fill_(
            empty, 0.0
        ),
        across=dot.across,
        of_sums=of_sums + (of_l * along_out.square()).squeeze(2),
        shared=torch.zeros_like(of_sums),
        alone=dot.variance,
        peaked=(top > 1 - _PEAKED * c.u_in) & ~empty,
    )
    return of_out, of_lse


def _window(
    x: torch.Tensor, variance: torch.Tensor, systematic: torch.Tensor, cast: Format | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values after a cast, and the variances of their errors."""
    if cast is None:
        return x, variance
    middle, half = cast.between(x, systematic + DEVIATIONS * variance.sqrt())
    return middle, half.square_()


def _backward(
    x: Chunk, given: Returned, pairs: _Pairs, of_dq: torch.Tensor, of_dk: torch.Tensor,
    of_dv: torch.Tensor, t: float, c: Constants, numerics: Numerics, in_dtype: str,
    step: int,
) -> tuple[Spread, _Keys, _Keys]:  # fmt: skip
    """Returns the errors of dq, and the contributions to those of dk and dv, given the forward."""
    assert given.out is not None
    assert given.lse is not None
    cast = cast_format(in_dtype, numerics)
    q2, k2, dout2 = x.q.square(), x.k.square(), x.dout.square()
    out = given.out.to(torch.float64).masked_fill(x.empty.unsqueeze(2), 0.0)
    lse = given.lse.to(torch.float64).masked_fill(x.empty, 0.0).unsqueeze(2)
    # 1. P, from the returned lse.
    p = (pairs.s - lse).exp_().masked_fill_(x.hidden, 0.0)
    systematic = pairs.dot.one_sided + 5 * c.u * pairs.s.abs() + c.u_exp
    of_lse = 3 * c.u * lse.abs()
    p_systematic = p * systematic
    p_variance = p.square() * (pairs.dot.variance + systematic.square())
    p_cast, p_random = _window(p, p_variance, p * (systematic + of_lse) + c.ftz, cast)
    # 2. dP and delta.
    dp = (x.dout @ x.v.mT).masked_fill_(x.hidden, 0.0)
    dp_squares = (dout2 @ x.v.square().mT).masked_fill_(x.hidden, 0.0)
    of_dp = _dot(dp, dp_squares, float(x.v.shape[2]), c, step)
    delta = (x.stored_dout * out).sum(2, True)
    of_delta = (x.stored_dout * out).square().sum(2, True) + delta.square()
    if x.dlse is not None:
        dlse = x.dlse.unsqueeze(2)
        delta = delta - dlse
        of_delta = of_delta + delta.square() + 16 * dlse.square()
    of_delta = of_delta * (c.u**2 * (x.v.shape[2] + 4))
    # 3. dS before and after its cast.
    gap = dp - delta
    ds = p * gap
    gap_systematic = of_dp.one_sided + 3 * c.u * (dp.abs() + delta.abs())
    gap_random = of_dp.variance + gap_systematic.square()
    ds_variance = p_variance * gap.square() + p.square() * gap_random
    factor = t if numerics.ds_scaled else 1.0
    flushed = (c.ftz * (1 + dp.abs() + delta.abs())).masked_fill_(x.hidden, 0.0)
    e = (
        ds.abs() * (systematic + of_lse)
        + p * (gap_systematic + DEVIATIONS * of_delta.sqrt())
        + flushed
    )
    if numerics.ds_scaled:
        e += 2 * c.u * ds.abs() + c.eta_op / min(t, 1.0)
    ds_cast, ds_random = _window(ds * factor, ds_variance * factor**2, e * factor, cast)
    ds_cast, ds_random = (ds_cast / factor).masked_fill_(x.hidden, 0.0), ds_random / factor**2
    ds_random.masked_fill_(x.hidden, 0.0)
    p_cast.masked_fill_(x.hidden, 0.0)
    p_random.masked_fill_(x.hidden, 0.0)
    # 4. Errors in known directions. Errors of lse and delta belong to a row: dq has them in full.
    of_scores = ds * systematic
    of_gaps = p * gap_systematic
    of_products = _of_products(dp, dp_squares, x.dout, x.v, c, step)
    directions = (
        of_scores, of_scores * pairs.sign, ds * pairs.truncated,
        of_gaps, of_gaps * dp.sign(), p * of_products,
    )  # fmt: skip
    dq, by_delta = t * (ds_cast @ x.k), t * of_delta.sqrt() * (p @ x.k)
    along_k = t * (of_dq @ x.k.mT)
    tiles = x.seen.sum(2, True, dtype=torch.float64).div_(numerics.block_n).ceil_() + 1
    of_flushes = t * (flushed @ x.k.abs())
    of_tiles = (c.ftz * (tiles + 2)).masked_fill_(x.empty.unsqueeze(2), 0.0)
    dot = _dot(dq, t * t * (ds_cast.square() @ k2), (numerics.block_n + 2) * tiles, c, step)
    rows = Spread(
        value=dq,
        variance=t * t * (ds_random @ k2) + by_delta.square() + dot.variance,
        shapes=torch.stack([t * (y @ x.k) for y in directions]),
        along=(dot.along + (of_lse + 4 * c.u) * dq.abs() + of_flushes).add_(of_tiles),
        across=dot.across,
        of_sums=(ds_random * along_k.square()).sum(2) + (of_dq * by_delta).sum(2).square(),
        shared=torch.zeros_like(x.empty, dtype=torch.float64),
        alone=dot.variance,
        peaked=torch.zeros_like(x.empty).unsqueeze(2),
    )
    # 5. dk and dv: errors of lse and delta differ from row to row, but keys share them.
    additions = (x.query_tiles * (QUERY_TILE + 2)).unsqueeze(2)
    ds_shared = ds.square() * of_lse.square() + p.square() * of_delta
    along_q = t * (x.q @ of_dk.mT)
    dk = _Keys(
        value=t * (ds_cast.mT @ x.q),
        squares=t * t * (ds_cast.square().mT @ q2),
        variance=t * t * ((ds_random + ds_shared).mT @ q2),
        shapes=torch.stack([t * (y.mT @ x.q) for y in (*directions, ds * of_lse)]),
        of_sums=(ds_random * along_q.square()).sum(1),
        shared=(ds_shared * along_q.square()).sum(1),
        additions=additions,
        flushed=t * (flushed.mT @ x.q.abs()),
        weight=torch.zeros_like(additions),  # dk is never peaked
        light=torch.zeros_like(additions),
    )
    p_shared = p.square() * of_lse.square()
    # Weights that are nearly 1 are equal, and so are their roundings.
    of_ones = p_random.sqrt()
    of_ones.masked_fill_(p < 1 - _PEAKED * (c.u_in if cast is None else cast.u), 0.0)
    of_p = (
        p_systematic, p_systematic * pairs.sign, p * pairs.truncated, p * of_lse, of_ones,
    )  # fmt: skip
    along_dout = x.dout @ of_dv.mT
    dv = _Keys(
        value=p_cast.mT @ x.dout,
        squares=p_cast.square().mT @ dout2,
        variance=(p_random + p_shared).mT @ dout2,
        shapes=torch.stack([y.mT @ x.dout for y in of_p]),
        of_sums=(p_random * along_dout.square()).sum(1),
        shared=(p_shared * along_dout.square()).sum(1),
        additions=additions.clone(),
        flushed=c.ftz * (x.seen.to(x.dout.dtype).mT @ x.dout.abs()),
        weight=p.sum(1).unsqueeze(2),
        light=p.masked_fill(p >= 0.5, 0.0).sum(1).unsqueeze(2),
    )
    return rows, dk, dv


def _finished(keys: _Keys, c: Constants, step: int) -> Spread:
    dot = _dot(keys.value, keys.squares, keys.additions, c, step)
    return Spread(
        value=keys.value, variance=keys.variance + dot.variance, shapes=keys.shapes,
        along=dot.along + 4 * c.u * keys.value.abs() + keys.flushed + c.ftz * (keys.additions + 2),
        across=dot.across,
        of_sums=keys.of_sums, shared=keys.shared, alone=dot.variance,
        peaked=keys.light < _PEAKED * c.u_in * keys.weight,
    )  # fmt: skip


def _add_keys(total: _Keys | None, part: _Keys, x: Chunk) -> _Keys:
    """Returns the contributions of earlier chunks and of chunk x; ``total`` is changed."""
    columns = zip(_Keys._fields, total or (None,) * len(part), part, strict=True)
    return _Keys(*(
        added_up(whole, of_part, 1 + (name == "shapes"), x.around)
        for name, whole, of_part in columns
    ))  # fmt: skip


_Fields = TypeVar("_Fields", Spread, _Keys)


def _joined(parts: list[_Fields], axis: int = 0) -> _Fields:
    """Joins results along an axis of all fields but ``shapes``, where it is the next one."""
    kind = type(parts[0])
    columns = zip(kind._fields, zip(*parts, strict=True), strict=True)
    return kind(*(torch.cat(pieces, axis + (name == "shapes")) for name, pieces in columns))


def _of_heads(part: Spread, B: int, heads: int) -> Spread:
    """Splits the first axis into entries and heads, and the second one by them."""
    return Spread(*(
        x.view(*x.shape[:axis], B, heads, -1, *x.shape[axis + 2 :])
        for x, axis in zip(part, (name == "shapes" for name in Spread._fields), strict=True)
    ))  # fmt: skip


def _pieces(x: Chunk, pairs: int) -> Iterator[tuple[slice, Chunk]]:
    """Yields key/value heads of a chunk, as many as have at most ``pairs`` pairs, at least one."""
    Z, R, N = x.seen.shape
    size = max(1, pairs // max(1, R * N))
    for start in range(0, Z, size):
        here = slice(start, start + size)
        yield (
            here,
            x._replace(
                q=x.q[here],
                k=x.k[here],
                v=x.v[here],
                dout=x.dout[here],
                stored_dout=x.stored_dout[here],
                dlse=None if x.dlse is None else x.dlse[here],
                seen=x.seen[here],
                hidden=x.hidden[here],
                empty=x.empty[here],
                query_tiles=x.query_tiles[here],
            ),
        )


def _folded(given: Returned, x: Chunk) -> Returned:
    """Folds a group's heads into rows, as in a chunk."""
    return Returned(
        *(None if y is None else y.reshape(*x.empty.shape, *y.shape[3:]) for y in given)
    )


def _of_pieces(given: Returned, here: slice) -> Returned:
    return Returned(*(None if y is None else y[here] for y in given))


def spreads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    given: Returned | None,
    weights: Weights,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    rows: int | None = None,
) -> dict[str, Spread]:
    """Returns the errors of out and lse, and, given the forward, of dq, dk and dv.

    lse has a last axis of length 1, and is 0 in rows without a visible key.

    Args:
        q: (B, H, M, D), the kernel's inputs, any float dtype and strides.
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        dout: (B, H, M, Dv).
        dlse: (B, H, M), or None.
        given: The results of the forward that the backward reads. None skips the gradients, and so
            does a result that is not returned.
        weights: Weights of sums.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: "fp16", "bf16" or "fp32".
        numerics: The subject's declared numerics.
        rows: Height of a chunk; None limits its memory.
    """
    operands = operand_format(in_dtype, numerics)
    c = constants(in_dtype, numerics, replayed=operands is not None)
    step = _STEP if stored_format(in_dtype) is not None else 0 if operands is None else _STEP_TF32
    (B, H), (Hk, N) = q.shape[:2], k.shape[1:3]
    if rows is None:
        # Tall chunks of few heads: every chunk adds to all keys of its heads.
        rows = max(1, min(_PAIRS // (H // Hk * N), _SEEN // (B * H * N)))
    of_rows: dict[str, list[Spread]] = {"out": [], "lse": [], "dq": []}
    of_keys: dict[tuple[str, int], _Keys] = {}
    if given is not None and (given.out is None or given.lse is None):
        given = None
    of_dk, of_dv = (y.reshape(B * Hk, N, -1) for y in (weights.dk, weights.dv))
    inputs = (q, k, v, dout, dlse, None, None, None)
    blocks = chunks(
        *inputs, mask=mask, apart=1, rows=rows, tile=numerics.block_n, operands=operands
    )
    for rows_here, chunk in blocks:
        of_out, of_dq = (
            y[:, :, rows_here].reshape(*chunk.empty.shape, -1) for y in (weights.out, weights.dq)
        )
        back = None if given is None else _folded(given.rows(rows_here), chunk)
        found: dict[str, list[Spread]] = {"out": [], "lse": [], "dq": []}
        for here, x in _pieces(chunk, _PAIRS):
            fwd = forward_error(
                x, sm_scale=sm_scale, c=c, numerics=numerics, exact_spread=False, softcap=None
            )
            pairs = _pairs(x, fwd.scores.s, sm_scale, c, step)
            forward = _of_forward(x, fwd, pairs, of_out[here], sm_scale, c, numerics, step)
            for name, spread in zip(("out", "lse"), forward, strict=True):
                found[name].append(spread)
            if back is None:
                continue
            dq, dk, dv = _backward(
                x, _of_pieces(back, here), pairs, of_dq[here], of_dk[here, x.keys],
                of_dv[here, x.keys], sm_scale, c, numerics, in_dtype, step,
            )  # fmt: skip
            found["dq"].append(dq)
            # Added at once: the contributions of a long problem's chunks do not fit in memory.
            for name, part in (("dk", dk), ("dv", dv)):
                total = of_keys.get((name, here.start))
                of_keys[name, here.start] = _add_keys(total, part, x)
        for name, parts in found.items():
            if parts:
                of_rows[name].append(_of_heads(_joined(parts), B, H))
    result = {name: _joined(parts, 2) for name, parts in of_rows.items() if parts}
    for name in ("dk", "dv") if of_keys else ():
        total = _joined([part for (of, _), part in of_keys.items() if of == name])
        result[name] = _of_heads(_finished(total, c, step), B, Hk)
    return result
