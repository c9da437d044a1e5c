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

Rows or keys that are equal share their roundings. The sum of r errors that may be equal has a
variance of at most r times that of independent ones, by the inequality of Cauchy and Schwarz. So
``Copies`` multiplies variances: those of the terms of an element, and, in ``Spread.copies``, those
of the elements of a sum over rows. The weights of a row with nearly equal scores count as equal.

TF32 dots, whose conversion is declared, are those of the converted inputs. A conversion of P to
nearest is one more cast. A truncation loses a uniform share of the spacing, which is at most u_x p;
where P is 1 it loses nothing. Its mean is u_x p / 4 plus at most as much, which counts as a shape
where keys share it and as random, by the signs of v, where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from fa_verify.oracles.bounds.backward import QUERY_TILE
from fa_verify.oracles.bounds.constants import Constants, Count, constants
from fa_verify.oracles.bounds.error_model import chunks
from fa_verify.oracles.bounds.forward import (
    Chunk,
    Scores,
    added_up,
    joined,
    scored,
    softmax_additions,
)
from fa_verify.oracles.bounds.given_forward import Returned
from fa_verify.oracles.bounds.replay import Format, cast_format, operand_format, stored_format
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import DenseMask

__all__ = ["DEVIATIONS", "FEW", "FLAT", "Copies", "Spread", "Weights", "spreads"]

DEVIATIONS = 9.6
_PAIRS = 2**22  # pairs of which some forty float64 matrices are in memory at a time
_SEEN = 2**28  # pairs of which booleans alone are
# Products that a tensor core adds at a time. An A100 adds 4 in TF32; more lose less.
_STEP = 16
_STEP_TF32 = 4
_PEAKED = 16.0  # least weight of other keys, in units of u_in, that spreads out over its spacing
# Variance of scores below which the weights of a row count as equal: a deviation of a tenth is
# twelve spacings of bfloat16. Equal errors of few weights lie within the limit of independent ones:
# 9.6 sqrt(n / 3) is larger than n up to 30.
FLAT = 0.01
FEW = 30
_PEAK = 4.0  # largest partial sum of centred terms, in units of the root of their squares


class Weights(NamedTuple):
    """Weights of the errors in sums over a row or key: the true values, and 1 for lse."""

    out: torch.Tensor  # (B, H, M, Dv)
    dq: torch.Tensor  # (B, H, M, D)
    dk: torch.Tensor  # (B, Hk, N, D)
    dv: torch.Tensor  # (B, Hk, N, Dv)


class Copies(NamedTuple):
    """The numbers of rows of q, and of keys, that are equal to each, itself included, float64."""

    rows: torch.Tensor  # (B, H, M): among the rows that read the same keys
    keys: torch.Tensor  # (B, Hk, N): among the keys of the head
    rows_anywhere: torch.Tensor  # (B, H, M): among all rows whose errors are added up
    keys_anywhere: torch.Tensor  # (B, Hk, N)

    @property
    def none(self) -> bool:
        """Whether all rows and all keys differ."""
        return all(bool(x.amax() == 1) for x in self if x.numel())


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
        copies: (..., 1): the number of rows, or of keys, that may share their errors.
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
    copies: torch.Tensor

    @property
    def limit(self) -> torch.Tensor:
        """The largest error of each element before its last rounding."""
        one_sided = self.along + self.across
        return self.shapes.abs().sum(0) + one_sided + DEVIATIONS * self.variance.sqrt()


class _SumErrors(NamedTuple):
    """The errors of dots: random ones, and one-sided ones along the sum and across it."""

    variance: torch.Tensor
    along: torch.Tensor
    across: torch.Tensor


def _truncated_share(terms: Count, c: Constants, step: int) -> Count:
    """Returns what truncation takes from a sum of products, relative to its partial sums."""
    return 2 * c.h * c.u * (terms / step + 1) if step else 0 * terms


def _errors_of_sums(
    value: torch.Tensor, squares: torch.Tensor, terms: torch.Tensor, c: Constants, step: int
) -> _SumErrors:
    """Returns the errors of sums of products.

    Args:
        value: The sums.
        squares: The sums of the squares of their products.
        terms: The number of additions.
        c: The constants of the bound.
        step: Products that tensor cores add at a time, before they truncate; 0 without them.
    """
    variance = (c.h * c.u) ** 2 * terms * (value.square() + squares)
    lost = _truncated_share(terms, c, step)
    return _SumErrors(variance, lost * value.abs(), lost * _PEAK * squares.sqrt())


class _KeyErrors(NamedTuple):
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


class _Sharing(NamedTuple):
    """Factors of variances from ``Copies``, for the rows and keys of a chunk."""

    keys: torch.Tensor | float  # (Z, R or 1, N), in sums over keys
    rows: torch.Tensor | float  # (Z, R, 1), in sums over rows
    anywhere: torch.Tensor | float  # (Z, R, 1), ``Spread.copies``

    def of_keys(self, variance: torch.Tensor) -> torch.Tensor:
        """Returns the variances of terms of sums over keys, (Z, R, N)."""
        return variance if isinstance(self.keys, float) else variance * self.keys

    def of_rows(self, variance: torch.Tensor) -> torch.Tensor:
        """Returns the variances of terms of sums over rows, (Z, R, N) or (Z, R, 1)."""
        return variance if isinstance(self.rows, float) else variance * self.rows

    def copies(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of rows that share the errors of a row, (Z, R, 1)."""
        return torch.ones_like(like[..., :1]) if isinstance(self.anywhere, float) else self.anywhere


_INDEPENDENT = _Sharing(1.0, 1.0, 1.0)


def _sharing_of(
    copies: Copies | None, none: bool, scores: Scores, pairs: _Pairs, rows: slice, here: slice,
    chunk: Chunk,
) -> _Sharing:  # fmt: skip
    """Returns the factors of a piece of a chunk.

    Args:
        copies: Those of all rows and keys.
        none: Whether all of them are 1.
        scores: The scores of the piece.
        pairs: Its pairs.
        rows: The rows of the chunk.
        here: The heads of the piece.
        chunk: The piece.
    """
    if copies is None:
        return _INDEPENDENT
    everything = float(copies.rows.numel())
    seen = pairs.seen.sum(2, True)
    flat = (seen * scores.p.square().sum(2, True) < 1 + FLAT) & (seen > FEW)
    if none and not bool(flat.any()):
        return _INDEPENDENT
    of_rows, anywhere = (
        torch.where(flat, everything, y[:, :, rows].reshape(-1, chunk.empty.shape[1], 1)[here])
        for y in (copies.rows, copies.rows_anywhere)
    )
    of_keys = copies.keys.flatten(0, 1)[here, chunk.keys].unsqueeze(1)
    return _Sharing(torch.where(flat, seen, of_keys), of_rows, anywhere)


class _PairDots(NamedTuple):
    """The errors of dots of rows and keys, (Z, R, N)."""

    variance: torch.Tensor
    systematic: torch.Tensor  # the one-sided errors, with other errors of the pair
    truncated: torch.Tensor  # the loss of the products on tensor cores


def _errors_of_pair_dots(
    value: torch.Tensor, size: torch.Tensor, squares: torch.Tensor, left: torch.Tensor,
    right: torch.Tensor, relative: float, of_rows: torch.Tensor, c: Constants, step: int,
) -> _PairDots:  # fmt: skip
    """Returns the errors of dots, as ``_errors_of_sums`` does, in few passes over the pairs.

    Args:
        value: The dots.
        size: Their absolute values.
        squares: The sums of the squares of their products; changed.
        left: (Z, R, D), the operands of rows.
        right: (Z, N, D), those of keys.
        relative: A further systematic error, relative to ``size``.
        of_rows: (Z, R, 1), a further systematic error.
        c: The constants of the bound.
        step: As in ``_errors_of_sums``.
    """
    terms, root = left.shape[2], squares.sqrt()
    lost = _truncated_share(terms, c, step)
    systematic = torch.add(of_rows, root, alpha=lost * _PEAK).add_(size, alpha=lost + relative)
    truncated = _truncation_of_products(size, root, left, right, c, step)
    variance = squares.addcmul_(value, value).mul_((c.h * c.u) ** 2 * terms)
    return _PairDots(variance, systematic, truncated)


class _Pairs(NamedTuple):
    """Quantities of pairs of rows and keys, (Z, R, N)."""

    seen: torch.Tensor  # 1 where visible, 0 where hidden
    sign: torch.Tensor  # the sign of s
    dots: _PairDots  # those of s; ``systematic`` has 5u |s| and u_exp of the exponent as well


def _pairs(chunk: Chunk, scores: Scores, t: float, c: Constants, step: int) -> _Pairs:
    q, s = chunk.q * t, scores.s
    # An exponential of errors must be finite where hidden.
    squares = (q.square() @ chunk.k.square().mT).masked_fill_(chunk.hidden, 0.0)
    u_exp = torch.full_like(scores.m, c.u_exp).unsqueeze(2)
    dots = _errors_of_pair_dots(s, scores.size, squares, q, chunk.k, 5 * c.u, u_exp, c, step)
    return _Pairs(chunk.seen.to(torch.float64), s.sign(), dots)


def _truncation_of_products(
    size: torch.Tensor, root: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
    c: Constants, step: int,
) -> torch.Tensor:  # fmt: skip
    """Returns the mean of what tensor cores cut off the products of a sum, at most.

    Args:
        size: The absolute values of the sums.
        root: The roots of the sums of the squares of their products.
        left: As in ``_errors_of_pair_dots``.
        right: As in ``_errors_of_pair_dots``.
        c: The constants of the bound.
        step: As in ``_errors_of_sums``.
    """
    if not step:
        return torch.zeros_like(size)
    agree = (left.sign() * (c.h * c.u)) @ right.sign().mT
    return agree.mul_(torch.maximum(size, root))


def _errors_of_lse(
    chunk: Chunk, scores: Scores, pairs: _Pairs, p2: torch.Tensor, systematic: torch.Tensor,
    cast: torch.Tensor, shared: _Sharing, c: Constants, numerics: Numerics,
) -> Spread:  # fmt: skip
    """Returns the errors of lse, the logarithm of the softmax sum."""
    # 1. Dots, and the casts of P where their sum is taken.
    variance = shared.of_keys(p2 * pairs.dots.variance).sum(2)
    if numerics.l_from == "rounded":
        variance += cast.sum(2)
    # 2. Additions of the softmax sum, each of which errs by at most u of it, uniformly.
    variance += softmax_additions(chunk, scores, numerics) * (c.u**2 / 3)
    # 3. All else may have one sign: the exponents, the logarithm, and the maximum that it is added
    #    to.
    size = torch.maximum(scores.m.abs(), scores.lse.abs())
    along = pairs.dots.truncated.abs().add_(systematic).expm1_().mul_(scores.p).sum(2).log1p_()
    along += c.u_log * (1 + scores.log_l.abs() + scores.lag) + 4 * c.u * (size + scores.lag)
    value, variance, along = (
        y.masked_fill(chunk.empty, 0.0).unsqueeze(2) for y in (scores.lse, variance, along)
    )
    nothing = torch.zeros_like(value)
    return Spread(
        value=value, variance=variance, shapes=nothing.unsqueeze(0), along=along, across=nothing,
        of_sums=variance.squeeze(2), shared=nothing.squeeze(2), alone=nothing,
        peaked=torch.zeros_like(chunk.empty).unsqueeze(2), copies=shared.copies(nothing),
    )  # fmt: skip


def _errors_of_forward(
    chunk: Chunk, scores: Scores, pairs: _Pairs, weights: torch.Tensor, shared: _Sharing,
    c: Constants, numerics: Numerics, step: int,
) -> tuple[Spread, Spread]:  # fmt: skip
    """Returns the errors of out and of lse."""
    p, p2, dots, empty = scores.p, scores.p.square(), pairs.dots, chunk.empty.unsqueeze(2)
    out, v2, top = p @ chunk.v, chunk.v.square(), (scores.m - scores.lse).exp().unsqueeze(2)
    # 1. Scores: E without the largest error of the dots, and what tensor cores truncate.
    systematic = torch.sub(dots.systematic, scores.s, alpha=3 * c.u)
    systematic.add_((3 * c.u * (scores.m + scores.lag)).unsqueeze(2))
    systematic.add_(scores.rescales, alpha=c.u_exp)
    centred = shared.of_keys(torch.addcmul(dots.variance, systematic, systematic).mul_(p2))
    # 2. The cast of P, relative to the row's maximum. A sum of the rounded P cancels it in part.
    lost = torch.full_like(scores.m, c.eta_p).unsqueeze(2)
    if not numerics.p_normalised:
        lost *= top
    cast = shared.of_keys((pairs.seen * (lost.square() / 3)).add_(p2, alpha=c.u_p**2 / 3))
    lse_errors = _errors_of_lse(chunk, scores, pairs, p2, systematic, cast, shared, c, numerics)
    lost_v = c.ftz * (pairs.seen @ chunk.abs_v)
    # The conversion of P to TF32, after the sum of P. A truncation has a mean.
    truncates = c.u_x > 0 and numerics.tf32_conversion == "truncate"
    mean = c.u_x / 4 if truncates else 0.0
    of_conversion = c.u_x**2 / 12 + mean**2 if truncates else c.u_x**2 / 3
    if numerics.l_from == "rounded":
        centred += cast
        cast = shared.of_keys(p2) * of_conversion
    elif of_conversion:
        cast.add_(shared.of_keys(p2), alpha=of_conversion)
    variance = (centred @ v2) - 2 * out * (centred @ chunk.v) + out.square() * centred.sum(2, True)
    variance = variance.clamp_(min=0) + cast @ v2
    along_out, along_v = (weights * out).sum(2, True), weights @ chunk.v.mT
    of_sums = (along_v - along_out).square_().mul_(centred).sum(2)
    of_sums += along_v.square_().mul_(cast).sum(2)
    of_scores = p * systematic
    shapes = torch.stack([
        *(
            y @ chunk.v - out * y.sum(2, True)
            for y in (of_scores, of_scores * pairs.sign, p * dots.truncated)
        ),
        mean * out,
    ])  # fmt: skip
    # 3. The sums of P v and of P.
    additions = ((numerics.block_n + 2) * scores.tiles).unsqueeze(2)
    dot = _errors_of_sums(out, p2 @ v2, additions, c, step)
    of_l = c.u**2 * (additions + 2 * scores.tiles.unsqueeze(2) + 16)
    out_errors = Spread(
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
        copies=shared.copies(out),
    )
    return out_errors, lse_errors


def _replayed_cast(
    x: torch.Tensor, variance: torch.Tensor, systematic: torch.Tensor, cast: Format | None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns values that are cast in units of 1 / scale, and the variances of their errors."""
    if cast is None:
        return x, variance
    error = torch.add(systematic, variance.sqrt(), alpha=DEVIATIONS)
    if scale == 1.0:
        middle, half = cast.between(x, error)
    else:
        middle, half = (y.div_(scale) for y in cast.between(x * scale, error.mul_(scale)))
    return middle, half.square_()


class _Recomputed(NamedTuple):
    """P as the backward recomputes it from the returned lse, (Z, R, N).

    It is 0 where hidden, and so is what is multiplied by it.
    """

    p: torch.Tensor
    squares: torch.Tensor
    variance: torch.Tensor  # of its random errors, before its cast
    of_lse: torch.Tensor  # the relative error that all keys of a row share, (Z, R, 1)


def _errors_of_dv(
    chunk: Chunk, pairs: _Pairs, of_p: _Recomputed, dv_weights: torch.Tensor, shared: _Sharing,
    c: Constants, cast: Format | None,
) -> _KeyErrors:  # fmt: skip
    """Returns the contributions to the errors of dv."""
    p, p2, variance, of_lse = of_p
    dots, dout2, of_lse2 = pairs.dots, chunk.dout.square(), of_lse.square()
    systematic = p * dots.systematic
    error = torch.addcmul(systematic, p, of_lse).add_(pairs.seen, alpha=c.ftz)
    p_cast, random = _replayed_cast(p, variance, error, cast)
    # Weights that are nearly 1 are equal, and so are their roundings.
    least = 1 - _PEAKED * (c.u_in if cast is None else cast.u)
    of_ones = torch.where(p < least, 0.0, random).sqrt_()
    random, of_lse2 = shared.of_rows(random), shared.of_rows(of_lse2)
    directions = ((systematic, None), (systematic, pairs.sign), (p, dots.truncated))
    along2 = (chunk.dout @ dv_weights.mT).square_()
    additions = (chunk.query_tiles * (QUERY_TILE + 2)).unsqueeze(2)
    return _KeyErrors(
        value=p_cast.mT @ chunk.dout,
        squares=p_cast.square().mT @ dout2,
        variance=random.mT @ dout2 + p2.mT @ (of_lse2 * dout2),
        # Errors of lse differ from row to row, but keys share them.
        shapes=torch.stack([
            *(y.mT @ chunk.dout for y in _each_product(directions)),
            p.mT @ (of_lse * chunk.dout),
            of_ones.mT @ chunk.dout,
        ]),
        of_sums=(random * along2).sum(1),
        shared=(along2.mul_(p2).mT @ of_lse2).squeeze(2),
        additions=additions,
        flushed=c.ftz * (pairs.seen.mT @ chunk.abs_dout),
        weight=p.sum(1).unsqueeze(2),
        light=torch.where(p < 0.5, p, 0.0).sum(1).unsqueeze(2),
    )  # fmt: skip


def _each_product(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
) -> Iterator[torch.Tensor]:
    """Yields products, or the first factor where there is no second; one is in memory at a time."""
    for left, right in pairs:
        yield left if right is None else left * right


def _errors_of_dq_and_dk(
    chunk: Chunk, out: torch.Tensor, pairs: _Pairs, of_p: _Recomputed, dq_weights: torch.Tensor,
    dk_weights: torch.Tensor, of_copies: _Sharing, t: float, c: Constants, numerics: Numerics,
    cast: Format | None, step: int,
) -> tuple[Spread, _KeyErrors]:  # fmt: skip
    """Returns the errors of dq, and the contributions to those of dk, given out."""
    p, p2, p_variance, of_lse = of_p
    q2, k2, dots = chunk.q.square(), chunk.k.square(), pairs.dots
    # 1. dP and delta. Products of the dtypes here do not overflow, even where hidden.
    delta = (chunk.stored_dout * out).sum(2, True)
    of_delta = (chunk.stored_dout * out).square().sum(2, True) + delta.square()
    if chunk.dlse is not None:
        dlse = chunk.dlse.unsqueeze(2)
        delta = delta - dlse
        of_delta = of_delta + delta.square() + 16 * dlse.square()
    of_delta = of_delta * (c.u**2 * (chunk.v.shape[2] + 4))
    abs_delta, dp = delta.abs(), chunk.dout @ chunk.v.mT
    abs_dp = dp.abs()
    squares = chunk.dout.square() @ chunk.v.square().mT
    of_dp = _errors_of_pair_dots(
        dp, abs_dp, squares, chunk.dout, chunk.v, 3 * c.u, 3 * c.u * abs_delta, c, step
    )
    flushed = torch.add(c.ftz * (1 + abs_delta), abs_dp, alpha=c.ftz).masked_fill_(
        chunk.hidden, 0.0
    )
    # 2. dS before and after its cast. An error of dS is one of P or one of the gap dP - delta.
    gap = dp - delta
    ds = p * gap
    of_scores, of_gaps = ds * dots.systematic, p * of_dp.systematic
    variance = torch.addcmul(of_dp.variance, of_dp.systematic, of_dp.systematic)
    variance.mul_(p2).addcmul_(p_variance, gap.square_())
    error = torch.addcmul(flushed, p, DEVIATIONS * of_delta.sqrt()).add_(of_gaps)
    scaled = numerics.ds_scaled
    error.addcmul_(ds.abs(), dots.systematic + (of_lse + 2 * c.u if scaled else of_lse))
    if scaled:
        error.add_(pairs.seen, alpha=c.eta_op / min(t, 1.0))
    ds_cast, random = _replayed_cast(ds, variance, error, cast, t if scaled else 1.0)
    of_rows, of_keys = of_copies.of_rows(random), of_copies.of_keys(random)
    # 3. Errors in known directions. Errors of lse and delta belong to a row: dq has them in full.
    directions = (
        (of_scores, None), (of_scores, pairs.sign), (ds, dots.truncated),
        (of_gaps, None), (of_gaps, dp.sign_()), (p, of_dp.truncated),
    )  # fmt: skip
    shapes = [(y @ chunk.k, y.mT @ chunk.q) for y in _each_product(directions)]
    dq, by_delta = t * (ds_cast @ chunk.k), t * of_delta.sqrt() * (p @ chunk.k)
    along_k2, along_q2 = (
        ((t * dq_weights) @ chunk.k.mT).square_(),
        (chunk.q @ (t * dk_weights).mT).square_(),
    )
    tiles = chunk.seen.sum(2, True, dtype=torch.float64).div_(numerics.block_n).ceil_() + 1
    of_flushes = t * (flushed @ chunk.abs_k)
    of_tiles = (c.ftz * (tiles + 2)).masked_fill_(chunk.empty.unsqueeze(2), 0.0)
    squares = ds_cast.square()
    dot = _errors_of_sums(dq, t * t * (squares @ k2), (numerics.block_n + 2) * tiles, c, step)
    rows = Spread(
        value=dq,
        variance=t * t * (of_keys @ k2) + by_delta.square() + dot.variance,
        shapes=t * torch.stack([y for y, _ in shapes]),
        along=(dot.along + (of_lse + 4 * c.u) * dq.abs() + of_flushes).add_(of_tiles),
        across=dot.across,
        of_sums=along_k2.mul_(of_keys).sum(2) + (dq_weights * by_delta).sum(2).square(),
        shared=torch.zeros_like(chunk.empty, dtype=torch.float64),
        alone=dot.variance,
        peaked=torch.zeros_like(chunk.empty).unsqueeze(2),
        copies=of_copies.copies(dq),
    )
    # 4. Errors of lse and delta differ from row to row, but keys share them.
    additions = (chunk.query_tiles * (QUERY_TILE + 2)).unsqueeze(2)
    shared = of_copies.of_rows((p2 * of_delta).addcmul_(ds.square(), of_lse.square()))
    keys = _KeyErrors(
        value=t * (ds_cast.mT @ chunk.q),
        squares=t * t * (squares.mT @ q2),
        variance=t * t * (of_rows.mT @ q2 + shared.mT @ q2),
        shapes=t * torch.stack([*(y for _, y in shapes), ds.mT @ (of_lse * chunk.q)]),
        of_sums=(of_rows * along_q2).sum(1),
        shared=along_q2.mul_(shared).sum(1),
        additions=additions,
        flushed=t * (flushed.mT @ chunk.abs_q),
        weight=torch.zeros_like(additions),  # dk is never peaked
        light=torch.zeros_like(additions),
    )
    return rows, keys


def _errors_of_backward(
    chunk: Chunk, given: Returned, scores: Scores, pairs: _Pairs, dq_weights: torch.Tensor,
    dk_weights: torch.Tensor, dv_weights: torch.Tensor, shared: _Sharing, t: float, c: Constants,
    numerics: Numerics, in_dtype: str, step: int,
) -> tuple[Spread, _KeyErrors, _KeyErrors]:  # fmt: skip
    """Returns the errors of dq, and the contributions to those of dk and dv, given the forward."""
    assert given.out is not None
    assert given.lse is not None
    cast, dots = cast_format(in_dtype, numerics), pairs.dots
    out = given.out.to(torch.float64).masked_fill(chunk.empty.unsqueeze(2), 0.0)
    lse = given.lse.to(torch.float64).masked_fill(chunk.empty, 0.0).unsqueeze(2)
    p = scores.p * (scores.lse.unsqueeze(2) - lse).exp_()
    p2 = p.square()
    variance = torch.addcmul(dots.variance, dots.systematic, dots.systematic).mul_(p2)
    of_p = _Recomputed(p, p2, variance, 3 * c.u * lse.abs())
    dv = _errors_of_dv(chunk, pairs, of_p, dv_weights, shared, c, cast)
    dq, dk = _errors_of_dq_and_dk(
        chunk, out, pairs, of_p, dq_weights, dk_weights, shared, t, c, numerics, cast, step
    )
    return dq, dk, dv


def _with_errors_of_sums(
    keys: _KeyErrors, copies: torch.Tensor | None, c: Constants, step: int
) -> Spread:
    if copies is None:
        copies = torch.ones_like(keys.weight)
    dot = _errors_of_sums(keys.value, keys.squares, keys.additions, c, step)
    return Spread(
        value=keys.value, variance=keys.variance + dot.variance, shapes=keys.shapes,
        along=dot.along + 4 * c.u * keys.value.abs() + keys.flushed + c.ftz * (keys.additions + 2),
        across=dot.across,
        of_sums=keys.of_sums, shared=keys.shared, alone=dot.variance,
        peaked=keys.light < _PEAKED * c.u_in * keys.weight, copies=copies,
    )  # fmt: skip


def _added(total: _KeyErrors | None, part: _KeyErrors, chunk: Chunk) -> _KeyErrors:
    """Returns the contributions of earlier chunks and of chunk chunk; ``total`` is changed."""
    columns = zip(_KeyErrors._fields, total or (None,) * len(part), part, strict=True)
    return _KeyErrors(*(
        added_up(whole, of_part, 1 + (name == "shapes"), chunk.around)
        for name, whole, of_part in columns
    ))  # fmt: skip


_Fields = TypeVar("_Fields", Spread, _KeyErrors)


def _joined(parts: list[_Fields], axis: int = 0) -> _Fields:
    """Joins results along an axis of all fields but ``shapes``, where it is the next one."""
    kind = type(parts[0])
    columns = zip(kind._fields, zip(*parts, strict=True), strict=True)
    return kind(*(joined(pieces, axis + (name == "shapes")) for name, pieces in columns))


def _by_heads(part: Spread, B: int, heads: int) -> Spread:
    """Splits the first axis into entries and heads, and the second one by them."""
    return Spread(*(
        x.view(*x.shape[:axis], B, heads, -1, *x.shape[axis + 2 :])
        for x, axis in zip(part, (name == "shapes" for name in Spread._fields), strict=True)
    ))  # fmt: skip


def _pieces(chunk: Chunk, pairs: int) -> Iterator[tuple[slice, Chunk]]:
    """Yields key/value heads of a chunk, as many as have at most ``pairs`` pairs, at least one."""
    Z, R, N = chunk.seen.shape
    size = max(1, pairs // max(1, R * N))
    for start in range(0, Z, size):
        here = slice(start, start + size)
        yield (
            here,
            chunk._replace(
                q=chunk.q[here],
                k=chunk.k[here],
                v=chunk.v[here],
                dout=chunk.dout[here],
                stored_dout=chunk.stored_dout[here],
                dlse=None if chunk.dlse is None else chunk.dlse[here],
                seen=chunk.seen[here],
                hidden=chunk.hidden[here],
                empty=chunk.empty[here],
                query_tiles=chunk.query_tiles[here],
            ),
        )


def _folded(given: Returned, chunk: Chunk) -> Returned:
    """Folds a group's heads into rows, as in a chunk."""
    return Returned(
        *(None if y is None else y.reshape(*chunk.empty.shape, *y.shape[3:]) for y in given)
    )


def _piece_of(given: Returned, here: slice) -> Returned:
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
    copies: Copies | None = None,
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
        copies: The numbers of equal rows and keys; None if all differ, and no weights agree.
        rows: Height of a chunk; None limits its memory.
    """
    operands = operand_format(in_dtype, numerics)
    c = constants(in_dtype, numerics, replayed=operands is not None)
    step = _STEP if stored_format(in_dtype) is not None else 0 if operands is None else _STEP_TF32
    (B, H), (Hk, N) = q.shape[:2], k.shape[1:3]
    none = copies is not None and copies.none
    if rows is None:
        # Tall chunks of few heads: every chunk adds to all keys of its heads.
        rows = max(1, min(_PAIRS // (H // Hk * N), _SEEN // (B * H * N)))
    of_rows: dict[str, list[Spread]] = {"out": [], "lse": [], "dq": []}
    of_keys: dict[tuple[str, int], _KeyErrors] = {}
    if given is not None and (given.out is None or given.lse is None):
        given = None
    dk_weights, dv_weights = (y.reshape(B * Hk, N, -1) for y in (weights.dk, weights.dv))
    inputs = (q, k, v, dout, dlse, None, None, None)
    blocks = chunks(
        *inputs, mask=mask, apart=1, rows=rows, tile=numerics.block_n, operands=operands
    )
    for rows_here, chunk in blocks:
        out_weights, dq_weights = (
            y[:, :, rows_here].reshape(*chunk.empty.shape, -1) for y in (weights.out, weights.dq)
        )
        back = None if given is None else _folded(given.rows(rows_here), chunk)
        found: dict[str, list[Spread]] = {"out": [], "lse": [], "dq": []}
        for here, piece in _pieces(chunk, _PAIRS):
            scores = scored(piece, sm_scale, c, numerics, softcap=None)
            pairs = _pairs(piece, scores, sm_scale, c, step)
            shared = _sharing_of(copies, none, scores, pairs, rows_here, here, piece)
            forward = _errors_of_forward(
                piece, scores, pairs, out_weights[here], shared, c, numerics, step
            )
            for name, spread in zip(("out", "lse"), forward, strict=True):
                found[name].append(spread)
            if back is None:
                continue
            dq, dk, dv = _errors_of_backward(
                piece, _piece_of(back, here), scores, pairs, dq_weights[here],
                dk_weights[here, piece.keys],
                dv_weights[here, piece.keys], shared, sm_scale, c, numerics, in_dtype, step,
            )  # fmt: skip
            found["dq"].append(dq)
            # Added at once: the contributions of a long problem's chunks do not fit in memory.
            for name, part in (("dk", dk), ("dv", dv)):
                total = of_keys.get((name, here.start))
                of_keys[name, here.start] = _added(total, part, piece)
        for name, parts in found.items():
            if parts:
                of_rows[name].append(_by_heads(_joined(parts), B, H))
    result = {name: _joined(parts, 2) for name, parts in of_rows.items() if parts}
    for name in ("dk", "dv") if of_keys else ():
        total = _joined([part for (of, _), part in of_keys.items() if of == name])
        of_copies = None if copies is None else copies.keys_anywhere.reshape(-1, N, 1)
        result[name] = _by_heads(_with_errors_of_sums(total, of_copies, c, step), B, Hk)
    return result
