"""The bound of attention to codes with scales in NumPy: one row, and plain loops.

A second writing of ``oracles/bounds/quantised.py``, which has the derivation. It shares no code
with it. Sums are kept as pairs of a lower and an upper end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.in_numpy import decoded, encoded
from fa_verify.oracles.quantised_numerics import QuantisedNumerics

__all__ = ["RowBound", "bound_of_row"]

Array = NDArray[Any]
U = 2.0**-24
U_EXP = 2.0**-22
TINY = 2.0**-126
# The least normal number of e4m3.
LEAST_NORMAL = 2.0**-6
ROUNDOFF = {"fp16": (2.0**-11, 2.0**-24), "bf16": (2.0**-8, 2.0**-133)}


class RowBound(NamedTuple):
    """The middles and half widths of out (Dv,) and lse of a row."""

    out: Array
    out_bound: Array
    lse: float
    lse_bound: float


class _Pivot(NamedTuple):
    """A maximum that may be in use, known to an interval."""

    low: float
    high: float


def _outward(low: float, high: float, error: float) -> tuple[float, float]:
    return low - abs(low) * error, high + abs(high) * error


def _rounded(p: float, numerics: QuantisedNumerics) -> float:
    """Returns P rounded to its format."""
    if numerics.p_format in FORMATS:
        form = FORMATS[numerics.p_format]
        return float(decoded(encoded(np.array([p]), form, numerics.p_rounding), form)[0])
    u, smallest = ROUNDOFF[numerics.p_format]
    unit = max(2 * u * 2.0 ** math.floor(math.log2(p)), smallest) if p else smallest
    return round(p / unit) * unit


def _step(
    low: float, high: float, products: list[tuple[float, float]], bits: int, aligned: list[float]
) -> tuple[float, float]:
    """Returns a sum after a step of products, each with its lower and its upper end.

    ``aligned`` are the sizes of the products with codes of at least the least normal number.
    """
    before = max(abs(low), abs(high))
    sizes = [max(abs(a), abs(b)) for a, b in products]
    new_low, new_high = low + sum(a for a, _ in products), high + sum(b for _, b in products)
    if bits == 11:
        count = (len(products) + 1) * 2.0**-bits
        error = count / max(2.0**-10, 1 - count) * (sum(sizes) + before)
        return new_low - error, new_high + error
    unit = 2.0 ** (1 - bits)
    largest = max([before, *aligned])
    positive = sum(a + b > 0 for a, b in products) + (high > 0)
    negative = sum(a + b < 0 for a, b in products) + (low < 0)
    new_low -= positive * unit * largest
    new_high += negative * unit * largest
    return new_low - unit * max(new_low, 0.0), new_high - unit * min(new_high, 0.0)


def _dot(q: Array, k: Array, numerics: QuantisedNumerics, is_integer: bool) -> tuple[float, float]:
    """Returns the ends of q.k."""
    exact = sum(float(a) * float(b) for a, b in zip(q, k, strict=True))
    if is_integer:
        return _outward(exact, exact, U)
    if numerics.qk_bits == 24:
        n = max(len(q), 16) * U
        error = n / (1 - n) * sum(abs(float(a) * float(b)) for a, b in zip(q, k, strict=True))
        return exact - error, exact + error
    low = high = 0.0
    for start in range(0, len(q), 32):
        here = slice(start, start + 32)
        products = [float(a) * float(b) for a, b in zip(q[here], k[here], strict=True)]
        aligned = [
            max(abs(float(a)), LEAST_NORMAL) * max(abs(float(b)), LEAST_NORMAL) * (a * b != 0)
            for a, b in zip(q[here], k[here], strict=True)
        ]
        low, high = _step(low, high, [(x, x) for x in products], numerics.qk_bits, aligned)
    return low, high


def _moved(
    pivots: list[_Pivot], tile: _Pivot, most: float, threshold: float
) -> tuple[list[_Pivot], bool]:
    """Returns the pivots after a tile, and whether they exceed the number that is replayed."""
    if threshold == 0:
        low = max([tile.low, *(x.low for x in pivots)])
        return [_Pivot(low, max([tile.high, *(x.high for x in pivots)]))], False
    slack = 8 * U * (1 + abs(most))
    stay = [x for x in pivots if tile.low - x.high <= threshold + slack]
    if not pivots or any(tile.high - x.low > threshold - slack for x in pivots):
        if len(stay) == 4:
            return stay, True
        stay.append(tile)
    return stay, False


def _cast_ends(
    low: float, high: float, pivots: list[_Pivot], top: float, numerics: QuantisedNumerics
) -> tuple[float, float]:
    """Returns the ends of a cast P relative to 2**top, over the pivots that it may have."""
    off, near = numerics.offset, U_EXP + U
    ends = []
    for pivot in pivots:
        p_low = 2.0 ** (low - pivot.high + off) * (1 - near)
        p_high = 2.0 ** (high - pivot.low + off) * (1 + near)
        ends.append((
            _rounded(p_low, numerics) * 2.0 ** (pivot.low - off - top),
            _rounded(p_high, numerics) * 2.0 ** (pivot.high - off - top),
        ))  # fmt: skip
    return min(a for a, _ in ends), max(b for _, b in ends)


def _wide_ends(
    low: float, high: float, most: float, top: float, numerics: QuantisedNumerics
) -> tuple[float, float]:
    """Returns the ends of P where any cast may be off by half a spacing."""
    if numerics.p_format in FORMATS:
        form = FORMATS[numerics.p_format]
        relative, absolute = 2.0 ** -(form.mantissa + 1), form.spacing / 2
    else:
        relative, absolute = ROUNDOFF[numerics.p_format]
    if numerics.p_rounding == "truncate":
        relative, absolute = 2 * relative, 2 * absolute
    absolute *= 2.0 ** (most - numerics.offset - top)
    return max(0.0, low * (1 - relative) - absolute), high * (1 + relative) + absolute


def _pv(
    ends: tuple[float, float],
    weights: list[tuple[float, float]],
    column: Array,
    numerics: QuantisedNumerics,
    least: float,
) -> tuple[float, float]:
    """Returns the ends of a sum of PV after a tile; ``least`` is the least normal P."""
    aligned = [
        max(b, least) * max(abs(float(y)), LEAST_NORMAL) * (b != 0 and y != 0)
        for (_, b), y in zip(weights, column, strict=True)
    ]
    products = [
        (a * float(y), b * float(y)) if y > 0 else (b * float(y), a * float(y))
        for (a, b), y in zip(weights, column, strict=True)
    ]
    bits, low, high = numerics.pv_bits, *ends
    if bits == 24:
        n = (len(products) + 2) * U
        reached = sum(b * abs(float(y)) for (_, b), y in zip(weights, column, strict=True))
        reached += max(abs(low), abs(high))
        low, high = low + sum(a for a, _ in products), high + sum(b for _, b in products)
        last = max(abs(low), abs(high)) * U
        return low - n / (1 - n) * reached - last, high + n / (1 - n) * reached + last
    part = (low, high) if numerics.pv_promotion == "row" else (0.0, 0.0)
    width = len(products) if bits == 11 else 32
    for start in range(0, len(products), width):
        here = slice(start, start + width)
        part = _step(*part, products[here], bits, aligned[here])
        if numerics.pv_promotion == "step":
            low, high = _joined(low, high, part)
            part = (0.0, 0.0)
    if numerics.pv_promotion == "row":
        return part
    return (low, high) if numerics.pv_promotion == "step" else _joined(low, high, part)


def _joined(low: float, high: float, part: tuple[float, float]) -> tuple[float, float]:
    """Returns the ends of a float32 sum of a sum and a part."""
    low, high = low + part[0], high + part[1]
    error = max(abs(low), abs(high)) * U
    return low - error, high + error


def bound_of_row(
    q: Array,
    k: Array,
    v: Array,
    factor: Array,
    v_scale: Array,
    seen: Array,
    *,
    out_dtype: str,
    is_integer: bool,
    block_n: int,
    rescale_threshold: float,
    l_from: str,
    numerics: QuantisedNumerics,
) -> RowBound:
    """Returns the replayed out and lse of a row, and their bounds.

    Args:
        q: (D,), the numbers of codes, like the next two.
        k: (N, D).
        v: (N, Dv).
        factor: (N,), q_scale k_scale sm_scale.
        v_scale: (Dv,).
        seen: bool (N,).
        out_dtype: "fp16" or "bf16".
        is_integer: Whether q and k are integers.
        block_n: Width of the key tiles.
        rescale_threshold: As in ``Numerics``.
        l_from: As in ``Numerics``.
        numerics: The declared numerics.
    """
    N, Dv = v.shape
    keys = [n for n in range(N) if seen[n]]
    if not keys:
        return RowBound(np.zeros(Dv), np.zeros(Dv), -math.inf, 0.0)
    # 1. Scores, in powers of two.
    scores: dict[int, tuple[float, float]] = {}
    exact: dict[int, float] = {}
    for n in keys:
        c = float(factor[n]) * math.log2(math.e)
        low, high = _dot(q, k[n], numerics, is_integer)
        scores[n] = _outward(low * c, high * c, 6 * U)
        exact[n] = sum(float(a) * float(b) for a, b in zip(q, k[n], strict=True)) * c
    top = max(exact.values())
    largest = max(max(abs(a), abs(b)) for a, b in scores.values())
    off = numerics.offset
    # 2. The tiles in turn.
    pivots: list[_Pivot] = []
    most, is_wide = -math.inf, False
    l_low = l_high = 0.0
    acc = [(0.0, 0.0)] * Dv
    starts = list(range(0, N, block_n))
    for start in starts if numerics.key_order == "first" else starts[::-1]:
        width = min(start + block_n, N) - start
        here = [n for n in range(start, start + width) if seen[n]]
        if not here:
            continue
        tile = _Pivot(max(scores[n][0] for n in here), max(scores[n][1] for n in here))
        rescaled = is_wide or any(tile.high > x.low for x in pivots)
        most = max(most, tile.high)
        pivots, beyond = _moved(pivots, tile, most, rescale_threshold)
        is_wide = is_wide or beyond
        if rescaled:
            error = U_EXP + U + 4 * U * largest
            l_low, l_high = _outward(l_low, l_high, error)
            acc = [_outward(*ends, error) for ends in acc]
        # 3. P, and its cast.
        weights, terms = [(0.0, 0.0)] * width, [(0.0, 0.0)] * width
        for n in here:
            low, high = scores[n]
            slip = 4 * U * (abs(low) + abs(high) + largest + off)
            low, high = low - slip, high + slip
            near = U_EXP + U
            p = (2.0 ** (low - top) * (1 - near), 2.0 ** (high - top) * (1 + near))
            cast = (
                _wide_ends(*p, most, top, numerics)
                if is_wide
                else _cast_ends(low, high, pivots, top, numerics)
            )
            weights[n - start] = cast
            terms[n - start] = p if l_from == "unrounded" else cast
        l_low, l_high = _outward(
            l_low + sum(a for a, _ in terms), l_high + sum(b for _, b in terms),
            (width + 2) * U / (1 - N * U),
        )  # fmt: skip
        here_v = v[start : start + width]
        least = LEAST_NORMAL * 2.0 ** (most - off - top)
        acc = [_pv(acc[d], weights, here_v[:, d], numerics, least) for d in range(Dv)]
        if numerics.pv_bits == 11:
            lost = width * 2.0**-24 * 2.0 ** (most - off - top)
            acc = [(a - lost, b + lost) for a, b in acc]
    # 4. Underflow, division, the scale of v, and the last cast.
    l_low, l_high = l_low - N * TINY, l_high + N * TINY
    u, smallest = ROUNDOFF[out_dtype]
    out, bound = np.zeros(Dv), np.zeros(Dv)
    for d in range(Dv):
        lost = N * TINY * max(abs(float(v[n, d])) for n in range(N))
        low, high = acc[d][0] - lost, acc[d][1] + lost
        low, high = min(low / l_low, low / l_high), max(high / l_low, high / l_high)
        low, high = _outward(low * float(v_scale[d]), high * float(v_scale[d]), 5 * U)
        out[d], half = (low + high) / 2, (high - low) / 2
        bound[d] = half + u * (abs(out[d]) + half) + smallest
    # 5. lse.
    low, high = (top * math.log(2) + math.log(x) for x in (l_low, l_high))
    lse, of_lse = (low + high) / 2, (high - low) / 2
    of_lse += 4 * U * (largest + off + abs(math.log(l_high)) + math.log2(N + 2))
    of_lse += U_EXP * (1 + math.log(N + 2) + off) + 2 * U * abs(lse)
    return RowBound(out, bound, lse, of_lse)
