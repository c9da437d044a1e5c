"""The replayed forward of attention to codes with scales, and its bound.

A kernel casts P to a format of 8 bits relative to a pivot, the row's running maximum. Half a
spacing of such a format is 6 % of P. The bound therefore replays the cast. An interval of scores
gives one of P, and both of its ends are cast. They agree but for P near the middle of two codes.

The scores t are binary logarithms: ``t = q.k * q_scale * k_scale * sm_scale * log2(e)``. All sums
are intervals relative to ``2**top``, with top the row's maximum.

Axes: r is a row of any entry and head, n a key, c a candidate for the pivot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fa_verify.oracles.bounds.replay import nearest
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.in_torch import decoded, encoded
from fa_verify.oracles.quantised_numerics import QuantisedNumerics

__all__ = ["OutOfRangeError", "Replayed", "replayed_attention", "replayed_forward"]

Tensor: TypeAlias = torch.Tensor
Interval: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_U = 2.0**-24
_U_EXP = 2.0**-22  # ex2.approx and lg2.approx
_LEAST = 2.0**-126  # float32 numbers below may count as 0
_STEP = 32  # products that a tensor core of 8 bits adds at a time
# The least normal number of e4m3. Tensor cores align the product of a smaller code as if it were
# this large; one of 0 is no addend. Measured on an H200: 0.5 = 256 * 2**-9 keeps a summand of
# 2**-11 and loses 2**-12, and 0.5 = 64 * 2**-7 keeps 2**-13.
_LEAST_NORMAL = 2.0**-6
_CANDIDATES = 4  # pivots of a row that are replayed; beyond them the wide bound holds
_LARGEST_SCORE = 2.0**24  # beyond, float32 has no digits left for the exponent
_LARGEST_FP16 = 65504.0
# Unit roundoff, spacing of subnormal numbers, and largest number.
_OF_16_BITS = {
    "fp16": (2.0**-11, 2.0**-24, 65504.0),
    "bf16": (2.0**-8, 2.0**-133, 2.0**128),
}


class OutOfRangeError(ValueError):
    """A correct kernel may overflow."""


class Replayed(NamedTuple):
    """The middle of what a correct kernel may return, and half the width, float64.

    Args:
        out: (R, Dv).
        out_bound: (R, Dv).
        lse: (R,); -inf in a row without a visible key.
        lse_bound: (R,).
        ambiguous: The share of visible pairs whose P may be cast to two codes.
        wide: The number of rows whose casts are not replayed.
    """

    out: Tensor
    out_bound: Tensor
    lse: Tensor
    lse_bound: Tensor
    ambiguous: float
    wide: int


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """The arithmetic of sums of products."""

    bits: int
    promotion: str = "row"

    @property
    def truncates(self) -> bool:
        """Whether sums of 32 products are truncated."""
        return self.bits in (13, 14)

    def added(
        self, before: Interval, weights: Interval, y: Tensor, least: Tensor | float
    ) -> Interval:
        """Returns a sum after another step of products, of numbers that are cut to its bits.

        Hopper's tensor cores shift the products of a step, and the sum before it, to the largest
        exponent among them, and drop what lies below. Addends lose towards 0: positive ones lower
        the sum, and negative ones raise it. The result loses again.

        Args:
            before: The interval of the sum, (..., R, C).
            weights: The interval of the left operand, (..., R, step), of numbers >= 0 or exact.
            y: The right operand, (..., step, C).
            least: The least normal number of the left operand, (..., R, 1) or a number.
        """
        low, high = _product(weights, y)
        s_low, s_high = before[0] + low, before[1] + high
        size = torch.maximum(weights[0].abs(), weights[1].abs())
        if not self.truncates:
            # In any order, each partial sum is rounded.
            reached = size @ y.abs() + torch.maximum(before[0].abs(), before[1].abs())
            count = (y.shape[-2] + 1) * 2.0**-self.bits
            lost = count / max(2.0**-10, 1 - count) * reached
            return s_low - lost, s_high + lost
        unit = 2.0 ** (1 - self.bits)
        aligned = torch.maximum(size, size.new_tensor(least) if isinstance(least, float) else least)
        terms = aligned.unsqueeze(-1) * y.abs().clamp(min=_LEAST_NORMAL).unsqueeze(-3)
        terms = terms * ((size > 0).unsqueeze(-1) & (y != 0).unsqueeze(-3))
        largest = torch.maximum(terms.amax(-2), torch.maximum(before[0].abs(), before[1].abs()))
        sign_w = (weights[0] + weights[1]).sign()
        signs = sign_w.unsqueeze(-1) * y.sign().unsqueeze(-3)
        up = (signs > 0).sum(-2) + (before[1] > 0).to(torch.int64)
        down = (signs < 0).sum(-2) + (before[0] < 0).to(torch.int64)
        s_low, s_high = s_low - up * unit * largest, s_high + down * unit * largest
        return s_low - unit * s_low.clamp(min=0), s_high - unit * s_high.clamp(max=0)


def _product(weights: Interval, y: Tensor) -> Interval:
    """Returns the interval of a product of an interval of numbers with exact ones."""
    low, high = weights
    above, below = y.clamp(min=0), y.clamp(max=0)
    return low @ above + high @ below, high @ above + low @ below


def _widened(x: Interval, relative: float | Tensor) -> Interval:
    """Returns an interval after an error relative to each number in it."""
    return x[0] - relative * x[0].abs(), x[1] + relative * x[1].abs()


def _dots(q: Tensor, k: Tensor, bits: int, is_integer: bool) -> Interval:
    """Returns the intervals of q.k, (R, N). Products of two codes are exact in float32."""
    exact = q @ k.mT
    if is_integer:  # sums in int32; their conversion rounds
        return _widened((exact, exact), _U)
    if bits == 24:
        D = max(q.shape[-1], 16)
        lost = D * _U / (1 - D * _U) * (q.abs() @ k.abs().mT)
        return exact - lost, exact + lost
    sums = _Sums(bits=bits)
    dots: Interval = (torch.zeros_like(exact), torch.zeros_like(exact))
    for start in range(0, q.shape[-1], _STEP):
        here = slice(start, start + _STEP)
        dots = sums.added(dots, (q[..., here], q[..., here]), k[..., here].mT, _LEAST_NORMAL)
    return dots


def _cast(x: Tensor, numerics: QuantisedNumerics) -> Tensor:
    """Returns float64 numbers rounded to the format of P."""
    if form := FORMATS.get(numerics.p_format):
        return decoded(encoded(x, form, numerics.p_rounding), form)
    u, smallest, _ = _OF_16_BITS[numerics.p_format]
    return nearest(x, u, smallest)


def _half_spacings(numerics: QuantisedNumerics) -> tuple[float, float]:
    """Returns the largest error of a cast of P, relative and below the least normal number."""
    if form := FORMATS.get(numerics.p_format):
        relative, absolute = 2.0 ** -(form.mantissa + 1), form.spacing / 2
    else:
        relative, absolute, _ = _OF_16_BITS[numerics.p_format]
    twice = 2 if numerics.p_rounding == "truncate" else 1
    return twice * relative, twice * absolute


def _tiles(N: int, block_n: int, key_order: str) -> Iterator[slice]:
    """Yields the key tiles in the order of a kernel."""
    starts = range(0, N, block_n)
    for start in starts if key_order == "first" else reversed(starts):
        yield slice(start, min(start + block_n, N))


class _Pivots:
    """The possible maxima in use of each row: intervals of up to four candidates."""

    def __init__(self, rows: int, threshold: float, device: torch.device) -> None:
        shape = (rows, 1 if threshold == 0 else _CANDIDATES)
        self.threshold = threshold
        self.low = torch.full(shape, -math.inf, dtype=torch.float64, device=device)
        self.high = self.low.clone()
        self.there = torch.zeros(shape, dtype=torch.bool, device=device)
        # Beyond the candidates: the maximum of all keys so far, and whether rows have more.
        self.most = self.low[:, :1].clone()
        self.wide = torch.zeros((rows, 1), dtype=torch.bool, device=device)
        self.may_change = torch.zeros((rows, 1), dtype=torch.bool, device=device)

    def visit(self, tile: Interval, live: Tensor) -> None:
        """Takes the interval of a tile's maximum, (R, 1) each, in rows where it has a key."""
        low, high = tile
        rises = (self.there & (high > self.low)).any(1, keepdim=True)
        self.may_change = live & (rises | self.wide)
        self.most = torch.where(live, torch.maximum(self.most, high), self.most)
        if self.threshold == 0:
            self.low = torch.where(live, torch.maximum(self.low, low), self.low)
            self.high = torch.where(live, torch.maximum(self.high, high), self.high)
            self.there = self.there | live
            return
        slack = 8 * _U * (1 + self.most.abs())
        stays = self.there & (low - self.high <= self.threshold + slack)
        moves = self.there & (high - self.low > self.threshold - slack)
        adds = live & (moves.any(1, keepdim=True) | ~self.there.any(1, keepdim=True))
        kept = torch.where(live, stays, self.there)
        # The new candidate takes the first free place.
        free = ~kept
        first = free & (free.cumsum(1) == 1)
        place = adds & first
        self.wide |= adds & ~free.any(1, keepdim=True)
        self.low = torch.where(place, low, self.low)
        self.high = torch.where(place, high, self.high)
        self.there = kept | place


def replayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    seen: Tensor,
    *,
    sm_scale: float,
    **known: Any,
) -> Replayed:
    """Returns ``replayed_forward`` of all entries and heads.

    Args:
        q: The numbers of codes, float64 (B, H, M, D).
        k: The same, (B, Hk, N, D).
        v: The same, (B, Hk, N, Dv).
        q_scale: (B, H, M), float64.
        k_scale: (B, Hk, N), float64.
        v_scale: (B, Hk, Dv), float64.
        seen: The visible pairs, bool (B, H, M, N). Rows and keys without a pair may hold NaN.
        sm_scale: The factor on q.k.
        known: The other arguments of ``replayed_forward``.

    Returns:
        Tensors of shapes (B, H, M, Dv) and (B, H, M); the counts are those of all.

    Raises:
        OutOfRangeError: A correct kernel may overflow.
    """
    (B, H, M, _), G, Dv = q.shape, q.shape[1] // k.shape[1], v.shape[3]
    rows, keys = seen.any(3), seen.any(2)
    results = []
    for b in range(B):
        for h in range(H):
            row, key, g = rows[b, h], keys[b, h], h // G
            factor = q_scale[b, h][:, None] * k_scale[b, g][None, :] * sm_scale
            results.append(
                replayed_forward(
                    q[b, h].masked_fill(~row[:, None], 0.0),
                    k[b, g].masked_fill(~key[:, None], 0.0),
                    v[b, g].masked_fill(~key[:, None], 0.0),
                    torch.where(seen[b, h], factor, 1.0),
                    v_scale[b, g],
                    seen[b, h],
                    **known,
                )
            )
    if not results:
        nothing = q.new_zeros((B, H, M, Dv)), q.new_zeros((B, H, M))
        return Replayed(nothing[0], nothing[0], nothing[1], nothing[1], 0.0, 0)
    out, out_bound, lse, lse_bound = (
        torch.stack([x[place] for x in results]).view(B, H, M, *(Dv,) * (place < 2))  # type: ignore[misc]
        for place in range(4)
    )
    pairs = [max(1, int(x.sum())) for x in seen.flatten(0, 1)]
    counts = [x.ambiguous * count for x, count in zip(results, pairs, strict=True)]
    ambiguous, wide = sum(counts) / sum(pairs), sum(x.wide for x in results)
    return Replayed(out, out_bound, lse, lse_bound, ambiguous, wide)


def replayed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor,
    v_scale: Tensor,
    seen: Tensor,
    *,
    out_dtype: str,
    is_integer: bool,
    block_n: int,
    rescale_threshold: float,
    l_from: str,
    numerics: QuantisedNumerics,
) -> Replayed:
    """Returns the forward of rows of one head, replayed, and its bound.

    Args:
        q: The numbers of the codes of q, float64 (R, D); 0 in padding.
        k: Those of k, (N, D); 0 in padding.
        v: Those of v, (N, Dv); 0 in padding.
        factor: q_scale k_scale sm_scale, float64 (R, N), > 0; 1 on hidden pairs.
        v_scale: (Dv,), float64.
        seen: The visible pairs, bool (R, N).
        out_dtype: "fp16" or "bf16".
        is_integer: Whether q and k are integers.
        block_n: Width of the key tiles.
        rescale_threshold: As in ``Numerics``.
        l_from: As in ``Numerics``.
        numerics: The declared numerics.

    Raises:
        OutOfRangeError: A correct kernel may overflow.
    """
    (R, N), Dv = seen.shape, v.shape[1]
    log2e, offset = math.log2(math.e), numerics.offset
    new: Any = {"dtype": torch.float64, "device": q.device}
    sums = _Sums(bits=numerics.pv_bits, promotion=numerics.pv_promotion)
    # 1. Scores as intervals: sums, then up to five products of scales, each rounded.
    per_dot = factor * log2e
    dots = _dots(q, k, numerics.qk_bits, is_integer)
    low, high = _widened((dots[0] * per_dot, dots[1] * per_dot), 6 * _U)
    t = (q @ k.mT) * per_dot
    low, high = low.masked_fill(~seen, -math.inf), high.masked_fill(~seen, -math.inf)
    t = t.masked_fill(~seen, -math.inf)
    empty = ~seen.any(1)
    # 2. The reference of all weights.
    top = t.amax(1, keepdim=True) if N else t.new_full((R, 1), -math.inf)
    top = top.masked_fill(empty[:, None], 0.0)
    # The rounding of m c, and the errors of one rescale.
    sizes = torch.maximum(low.abs(), high.abs()).masked_fill(~seen, 0.0)
    largest = sizes.amax(1, keepdim=True) if N else top
    if largest.numel() and not float(largest.amax()) < _LARGEST_SCORE:
        raise OutOfRangeError("a score is beyond the range of exponents")
    if sums.bits == 11 and N and not _fits_fp16(v, block_n, offset + rescale_threshold):
        raise OutOfRangeError("a sum of PV is beyond the range of fp16")
    of_rescale = _U_EXP + _U + 4 * _U * largest
    pivots = _Pivots(R, rescale_threshold, q.device)
    l_sum: Interval = (torch.zeros((R, 1), **new), torch.zeros((R, 1), **new))
    acc: Interval = (torch.zeros((R, Dv), **new), torch.zeros((R, Dv), **new))
    ambiguous = 0
    for tile in _tiles(N, block_n, numerics.key_order):
        here, of_tile = seen[:, tile], (low[:, tile], high[:, tile])
        live = here.any(1, keepdim=True)
        if not bool(live.any()):
            continue
        pivots.visit((of_tile[0].amax(1, keepdim=True), of_tile[1].amax(1, keepdim=True)), live)
        # 3. A rescale of the earlier sums, where the pivot may have moved.
        moved = of_rescale * pivots.may_change
        l_sum, acc = _widened(l_sum, moved), _widened(acc, moved)
        # 4. P relative to each candidate, cast at both ends.
        weights, exact, two = _weights(of_tile, here, top, pivots, numerics, offset, largest)
        ambiguous += int(two.sum())
        # 5. The softmax sum. It does not depend on the pivot.
        terms = exact if l_from == "unrounded" else weights
        l_new = [x.sum(1, keepdim=True) for x in terms]
        count = (tile.stop - tile.start + 2) * _U / (1 - N * _U)
        l_sum = _widened((l_sum[0] + l_new[0], l_sum[1] + l_new[1]), count * live)
        # 6. P V.
        least = _LEAST_NORMAL * torch.exp2(pivots.most - offset - top)
        after = _accumulated(acc, weights, v[tile], sums, least)
        # A row that sees no key of the tile adds zeros, which is exact.
        acc = (torch.where(live, after[0], acc[0]), torch.where(live, after[1], acc[1]))
        if sums.bits == 11:  # products below the least number of fp16
            lost = (tile.stop - tile.start) * 2.0**-24 * torch.exp2(pivots.most - offset - top)
            lost = lost.masked_fill(~live, 0.0)
            acc = (acc[0] - lost, acc[1] + lost)
    # 7. Numbers below the least of float32 count as 0, whatever the pivot.
    tiny = N * _LEAST
    l_low, l_high = l_sum[0] - tiny, l_sum[1] + tiny
    l_low, l_high = (x.masked_fill(empty[:, None], 1.0) for x in (l_low, l_high))
    lost = tiny * (v.abs().amax(0, keepdim=True) if N else torch.zeros((1, Dv), **new))
    acc = (acc[0] - lost, acc[1] + lost)
    # 8. Division, the scale of v, and the last cast.
    u, smallest, most = _OF_16_BITS[out_dtype]
    o_low = torch.minimum(acc[0] / l_low, acc[0] / l_high)
    o_high = torch.maximum(acc[1] / l_low, acc[1] / l_high)
    o_low, o_high = _widened((o_low * v_scale, o_high * v_scale), 5 * _U)
    if o_low.numel() and not float(torch.maximum(-o_low, o_high).amax()) * (1 + u) < most:
        raise OutOfRangeError("out is beyond the range of its dtype")
    middle, half = (o_low + o_high) / 2, (o_high - o_low) / 2
    bound = half + u * (middle.abs() + half) + smallest
    # 9. lse = m ln 2 + ln l - offset ln 2.
    low_lse, high_lse = (top * math.log(2) + x.log() for x in (l_low, l_high))
    lse, of_lse = (low_lse + high_lse) / 2, (high_lse - low_lse) / 2
    of_lse = of_lse + 4 * _U * (largest + offset + l_high.log().abs() + math.log2(N + 2))
    of_lse = of_lse + _U_EXP * (1 + math.log(N + 2) + offset) + 2 * _U * lse.abs()
    middle, bound = (x.masked_fill(empty[:, None], 0.0) for x in (middle, bound))
    lse, of_lse = lse.masked_fill(empty[:, None], -math.inf), of_lse.masked_fill(empty[:, None], 0)
    if not bool(bound.isfinite().all() & of_lse.isfinite().all()):
        raise OutOfRangeError("the scores have no digits left")
    pairs = max(1, int(seen.sum()))
    return Replayed(
        middle, bound, lse[:, 0], of_lse[:, 0], ambiguous / pairs, int(pivots.wide.sum())
    )


def _weights(
    scores: Interval,
    seen: Tensor,
    top: Tensor,
    pivots: _Pivots,
    numerics: QuantisedNumerics,
    offset: float,
    largest: Tensor,
) -> tuple[Interval, Interval, Tensor]:
    """Returns the intervals of cast P, and of P, relative to ``2**top``; and where two codes are.

    P is 0 on hidden pairs.
    """
    low, high = (x.masked_fill(~seen, 0.0) for x in scores)
    # The exponent t - m + offset: m c, the difference, and the offset are rounded.
    slip = 4 * _U * (low.abs() + high.abs() + largest + offset)
    low, high, near = low - slip, high + slip, _U_EXP + _U
    exact = (torch.exp2(low - top) * (1 - near), torch.exp2(high - top) * (1 + near))
    ends: list[Interval] = []
    two = torch.zeros_like(seen)
    for c in range(pivots.low.shape[1]):
        there = pivots.there[:, c : c + 1]
        m_low, m_high = (
            x[:, c : c + 1].masked_fill(~there, 0.0) for x in (pivots.low, pivots.high)
        )
        p_low = torch.exp2(low - m_high + offset) * (1 - near)
        p_high = torch.exp2(high - m_low + offset) * (1 + near)
        cast_low, cast_high = _cast(p_low, numerics), _cast(p_high, numerics)
        two |= there & seen & (cast_low != cast_high)
        # A candidate that is none changes nothing.
        ends.append((
            (cast_low * torch.exp2(m_low - offset - top)).masked_fill(~there, math.inf),
            (cast_high * torch.exp2(m_high - offset - top)).masked_fill(~there, -math.inf),
        ))  # fmt: skip
    w_low = torch.stack([x for x, _ in ends]).amin(0)
    w_high = torch.stack([x for _, x in ends]).amax(0)
    if bool(pivots.wide.any()):
        relative, spacing = _half_spacings(numerics)
        absolute = spacing * torch.exp2(pivots.most - offset - top)
        w_low = torch.where(pivots.wide, (exact[0] * (1 - relative) - absolute).clamp(min=0), w_low)
        w_high = torch.where(pivots.wide, exact[1] * (1 + relative) + absolute, w_high)
        two |= pivots.wide & seen
    weights = (w_low.masked_fill(~seen, 0.0), w_high.masked_fill(~seen, 0.0))
    return weights, (exact[0].masked_fill(~seen, 0.0), exact[1].masked_fill(~seen, 0.0)), two


def _accumulated(
    acc: Interval, weights: Interval, v: Tensor, sums: _Sums, least: Tensor
) -> Interval:
    """Returns the sums of PV after a tile, (R, Dv); see ``_Sums.added`` for ``least``."""
    if sums.bits == 24:
        return _in_fp32(acc, _product(weights, v), weights[1] @ v.abs(), v.shape[0])
    zero: Interval = (torch.zeros_like(acc[0]), torch.zeros_like(acc[1]))
    part = acc if sums.promotion == "row" else zero
    step = _STEP if sums.truncates else v.shape[0]
    for start in range(0, v.shape[0], step):
        here = slice(start, start + step)
        part = sums.added(part, (weights[0][:, here], weights[1][:, here]), v[here], least)
        if sums.promotion == "step":
            acc, part = _in_fp32(acc, part, None, 1), zero
    if sums.promotion == "row":
        return part
    return acc if sums.promotion == "step" else _in_fp32(acc, part, None, 1)


def _in_fp32(acc: Interval, part: Interval, reached: Tensor | None, count: int) -> Interval:
    """Returns a sum in float32 after another part.

    Args:
        acc: The sum.
        part: The part.
        reached: The sum of the |terms| of the part, which are added in any order; None for one.
        count: The number of terms.
    """
    low, high = acc[0] + part[0], acc[1] + part[1]
    of_terms: float | Tensor = 0.0
    before = torch.maximum(acc[0].abs(), acc[1].abs())
    if reached is not None:
        error = (count + 2) * _U / (1 - (count + 2) * _U)
        of_terms = error * (reached + before)
    after = torch.maximum(low.abs(), high.abs()) * _U
    return low - of_terms - after, high + of_terms + after


def _fits_fp16(v: Tensor, block_n: int, exponent: float) -> bool:
    """Returns whether sums of a tile stay in the range of fp16, for P up to a power of two."""
    tiles = v.abs().split(block_n)
    most = max(float(x.sum(0).amax()) if x.numel() else 0.0 for x in tiles)
    return bool(most * 2.0**exponent * 1.1 < _LARGEST_FP16)
