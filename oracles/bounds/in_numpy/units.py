"""The components of the NumPy bound: unit roundoffs of a kernel, and counts of roundings.

The roundoffs follow from the dtype and the declared numerics. The counts (tiles of a sum, rescales
of the accumulator) follow from the data. Suffixes of locals name axes: m query row, n key, d
head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.numpy_reference import Head

__all__ = [
    "Units",
    "conversion_of",
    "in_order_error",
    "lag_of",
    "prescale_underflow",
    "replayed",
    "replayed_operand",
    "rescales",
    "rounded",
    "seen_tiles",
    "sink_exponent_error",
    "sunk",
    "units_of",
]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Unit roundoff, and the absolute error of underflow: half the spacing of subnormals for fp16, the
# smallest normal number for the others, which may flush to zero.
_ROUNDING = {
    "fp16": (2.0**-11, 2.0**-25),
    "bf16": (2.0**-8, 2.0**-126),
    "fp32": (2.0**-24, 2.0**-126),
    "fp64": (2.0**-53, 2.0**-1022),
}


@dataclass(frozen=True, kw_only=True)
class Units:
    """The constants of the model: u, FTZ, the approximate functions, casts and dots.

    Args:
        u: Unit roundoff of the accumulators and of elementwise arithmetic.
        flush: Magnitude below which results may be flushed to zero.
        u_exp: Relative error of the exponential.
        u_log: Error of the logarithm, relative to 1 + its value.
        u_cast: Relative error of all casts of P and dS together.
        eta_cast: Absolute error of these casts if they underflow.
        u_stored: Unit roundoff of tensors in memory.
        eta_stored: Absolute error of a store that underflows.
        u_x: Relative error of a dot's operand beyond its dtype, as in TF32.
        u_input: The same of an operand that is an input, 0 if inputs were converted before; that
            of the scales of a dequantised input.
        eta_x: Absolute error of a subnormal operand of a dot, from its conversion to TF32 and from
            ``cut_off``.
        cut_off: Loss of the sum of 16 products on a tensor core, if an operand of one is subnormal
            and the other is 1.
        flush_op: Magnitude below which elementwise operands and results may be flushed, apart from
            casts, P and dS.
        accumulator: h, the accumulation constant of a dot.
        p_factor: The least factor on P before its cast, at most 1.
    """

    u: float
    flush: float
    u_exp: float
    u_log: float
    u_cast: float
    eta_cast: float
    u_stored: float
    eta_stored: float
    u_x: float
    u_input: float
    eta_x: float
    cut_off: float
    flush_op: float
    accumulator: float
    p_factor: float = 1.0

    @property
    def u_dot(self) -> float:
        """Relative error of a product of two inputs in a dot: (1 + u_input)^2 - 1."""
        return 2 * self.u_input + self.u_input**2

    def subnormal_operands(self, a_rd: FloatArray, b_ce: FloatArray) -> FloatArray:
        """Returns the error of the dots of the rows of a and b from subnormal elements, (R, C).

        It is 0 if a row is 0.
        """
        a_r1, b_1c = np.abs(a_rd).sum(axis=1)[:, None], np.abs(b_ce).sum(axis=1)[None, :]
        sums_rc = np.where((a_r1 > 0) & (b_1c > 0), a_r1 + b_1c, 0.0)
        return np.asarray(self.eta_x * (1 + self.u_dot) * sums_rc)

    @property
    def u_cast_dot(self) -> float:
        """The same of P or dS and an input: (1 + u_cast)(1 + u_x)(1 + u_input) - 1."""
        operands = self.u_x + self.u_input * (1 + self.u_x)
        return self.u_cast + operands + self.u_cast * operands

    def gamma(self, n: npt.ArrayLike) -> FloatArray:
        """Relative error of n IEEE additions in the accumulator's format: n u / (1 - n u)."""
        n_u: FloatArray = np.asarray(n, dtype=np.float64) * self.u
        return np.asarray(n_u / (1 - n_u))

    def g(self, n: npt.ArrayLike) -> FloatArray:
        """Relative error of a dot of length n: gamma of h n."""
        return self.gamma(self.accumulator * np.asarray(n, dtype=np.float64))


def conversion_of(in_dtype: str, numerics: Numerics) -> str | None:
    """Returns the conversion of operands to TF32, if each is converted once in a known way."""
    once = numerics.dots == "tf32" and in_dtype == "fp32" and numerics.prescales == "none"
    return numerics.tf32_conversion if once and numerics.tf32_conversion != "unknown" else None


def units_of(
    in_dtype: str,
    numerics: Numerics,
    converted: bool = False,
    *,
    dequantised: bool = False,
    p_factor: float = 1.0,
) -> Units:
    """Returns the constants for a dtype and the declared numerics.

    Args:
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics. p_dtype is ignored for "fp64", where P stays
            float64; dots is ignored for all but "fp32".
        converted: Whether the inputs were converted to the operands of dots before.
        dequantised: Whether k and v are products of codes and scales. Their float32 product is one
            rounding, and a scale that multiplies a dot is one more.
        p_factor: The least factor on P before its cast, at most 1.

    Raises:
        ValueError: in_dtype is unknown.
    """
    if in_dtype not in _ROUNDING:
        raise ValueError(f"in_dtype is {in_dtype!r}; needs one of {tuple(_ROUNDING)}")
    double = in_dtype == "fp64"
    u_stored, eta_stored = _ROUNDING[in_dtype]
    u_p, eta_p = u_stored, eta_stored
    if numerics.p_dtype == "fp32" and not double:
        u_p, eta_p = _ROUNDING["fp32"]
    r = numerics.ds_roundings
    flush = 2.0**-1022 if double else 2.0**-126
    u_accumulator = 2.0**-53 if double else 2.0**-24
    # 11 binary digits of a number; a rounding to nearest errs by half as much as a truncation.
    half = 0.5 if numerics.tf32_conversion in ("nearest", "nearest_away") else 1.0
    short = half * (numerics.dots == "tf32" and in_dtype == "fp32")
    # A subnormal operand has the exponent of the smallest normal number. Up to 16 products are
    # shifted to the largest sum of two exponents, and lose what lies 24 binary digits below it.
    smallest_exponent = {"fp16": -14, "bf16": -126, "fp32": -126 if short else None}.get(in_dtype)
    cut_off = 0.0
    if smallest_exponent is not None:
        cut_off = math.ldexp(16.0 * numerics.accumulator, smallest_exponent - 24)
    return Units(
        u=u_accumulator,
        flush=flush,
        u_exp=2.0**-51 if double else 2.0**-22,
        u_log=2.0**-51 if double else 2.0**-22,
        u_cast=float(np.expm1(r * np.log1p(u_p))),
        eta_cast=r * eta_p,
        u_stored=u_stored,
        eta_stored=eta_stored,
        u_x=2.0**-10 * short,
        u_input=2 * u_accumulator if dequantised else 0.0 if converted else 2.0**-10 * short,
        # TF32 drops 13 bits of a number whose last bit is 2**-149.
        eta_x=2.0**-136 * short + cut_off,
        cut_off=cut_off,
        flush_op=numerics.flushes * flush,
        accumulator=float(numerics.accumulator),
        p_factor=p_factor,
    )


def prescale_underflow(numerics: Numerics, sm_scale: float, units: Units) -> float:
    """Returns the error in a score or gradient from a loss of eta in a prescaled operand.

    If one operand carries the whole factor t log2(e), dividing by log2(e) multiplies the loss by
    ln 2. This holds for the score, which is in base 2, and for the gradient that reads the operand
    again. If both are prescaled, each may carry a square root of the factor. The loss in the score
    is then also multiplied by the other operand's factor, sqrt(t / ln 2) ln 2, and the loss in the
    gradient by t / sqrt(t / ln 2)::

        eta ln 2                            "q", "k"
        eta max(ln 2, sqrt(t ln 2))         "qk"

    Args:
        numerics: The kernel's declared numerics.
        sm_scale: t, the factor on q.k, > 0.
        units: The constants of the model.
    """
    ln2 = math.log(2.0)
    factor = max(ln2, math.sqrt(sm_scale * ln2)) if numerics.prescales == "qk" else ln2
    # The operand may be flushed before it is multiplied by the scale.
    return (units.eta_stored + units.flush_op * max(1.0, sm_scale / ln2)) * factor


def seen_tiles(seen_mn: BoolArray, width: int) -> FloatArray:
    """Returns the number of tiles of ``width`` columns with a visible pair in each row, (M,)."""
    count_m = np.zeros(seen_mn.shape[0])
    for start in range(0, seen_mn.shape[1], width):
        count_m += seen_mn[:, start : start + width].any(axis=1)
    return count_m


def sunk(head: Head) -> FloatArray:
    """Returns 1 in rows with a sink and 0 in others, (M,)."""
    return np.where(head.sink_m > -np.inf, 1.0, 0.0)


def sink_exponent_error(head: Head, numerics: Numerics, units: Units) -> FloatArray:
    """Returns the error of the sink's score and of its exponential, without rescales, (M,).

    The score itself is exact. It is 0 if the sink weighs nothing.
    """
    there_m = head.sink_probs_m > 0
    sink_m = np.where(there_m, head.sink_m, 0.0)
    below_m = np.where(there_m, head.row_max_m - sink_m, 0.0) + lag_of(head, numerics)
    error_m = units.u_exp + units.u * (5 * np.abs(sink_m) + 3 * below_m)
    return np.where(there_m, error_m, 0.0)


def lag_of(head: Head, numerics: Numerics) -> FloatArray:
    """Returns r, the largest distance of the maximum in use below the row's, natural units, (M,).

    It is 0 if one tile holds all keys that a row sees, and there is no sink.

    Args:
        head: The passes of the reference.
        numerics: The kernel's declared numerics: ``rescale_threshold`` and ``block_n`` are used.
    """
    several_m = seen_tiles(head.seen_mn, numerics.block_n) + sunk(head) > 1
    return np.where(several_m, numerics.rescale_threshold * math.log(2.0), 0.0)


def _possible_changes(tile_max: list[float], slack: float) -> int:
    """Counts the changes of the running maximum after the first tile, within an error ``slack``."""
    changes = 0
    running = tile_max[0]
    for here in tile_max[1:]:
        changes += here >= running - slack
        running = max(running, here)
    return changes


def _possible_changes_of_parts(tile_max: list[float], slack: float) -> int:
    """As ``_possible_changes``, if any consecutive tiles can be a split.

    Combining a split is one more change. As a split lacks at least one tile, there are fewer
    changes than tiles. Joining splits one after the other changes the maximum no more often, since
    the tile that raises it is counted.
    """
    tiles = len(tile_max)
    most = 0
    for first in range(tiles):
        for last in range(first + 1, tiles + 1):
            most = max(most, _possible_changes(tile_max[first:last], slack))
    return min(most + 1, tiles - 1)


def _possibly_larger(tile_max: list[float], slack: float) -> list[int]:
    """Returns, for each tile, how many others may have a larger maximum.

    Only these tiles change the running maximum, or that of the combined splits, once the tile is
    visited. This holds for every order of the tiles and every division into splits.
    """
    return [
        sum(other >= here - slack for place, other in enumerate(tile_max) if place != own)
        for own, here in enumerate(tile_max)
    ]


def rescales(
    head: Head, error_mn: FloatArray, sink_error_m: FloatArray, numerics: Numerics, any_order: bool
) -> FloatArray:
    """Returns R, the most changes of the running maximum after each key is visited, (M, N).

    Without ``any_order`` it is the larger count of a visit from either end, for all keys of a row.
    With it, R is the number of other tiles that may have a larger maximum than the key's tile. A
    score that nearly reaches the maximum counts as a change, because each score has an error. A
    sink changes the maximum once more, whenever it is visited.

    Args:
        head: The passes of the reference.
        error_mn: (M, N) errors of the scores, >= 0.
        sink_error_m: (M,) errors of the sinks, >= 0.
        numerics: The kernel's declared numerics: ``block_n`` and ``splits`` are used.
        any_order: Whether a kernel may visit the tiles of a row in any order.
    """
    block_n = numerics.block_n
    changes = _possible_changes if numerics.splits == 1 else _possible_changes_of_parts
    M, N = head.seen_mn.shape
    count_mn = np.zeros((M, N))
    for m in range(M):
        seen_n = head.seen_mn[m]
        if not seen_n.any():
            continue
        slack = 2 * max(float(error_mn[m, seen_n].max()), float(sink_error_m[m]))
        tiles, tile_max = [], []
        for start in range(0, N, block_n):
            tile = slice(start, start + block_n)
            if seen_n[tile].any():
                tiles.append(tile)
                tile_max.append(float(head.scores_mn[m, tile][seen_n[tile]].max()))
        if any_order:
            for tile, larger in zip(tiles, _possibly_larger(tile_max, slack), strict=True):
                count_mn[m, tile] = larger
        else:
            count_mn[m] = max(changes(tile_max, slack), changes(tile_max[::-1], slack))
    return count_mn + sunk(head)[:, None]


def _nearest_away(x: FloatArray) -> FloatArray:
    """Returns the nearest integers, with ties away from 0."""
    fraction, whole = np.modf(x)
    return np.asarray(whole + np.trunc(2 * fraction))


_TO_INTEGER: dict[str, Callable[[FloatArray], Any]] = {
    "truncate": np.trunc, "nearest": np.rint, "nearest_away": _nearest_away,
}  # fmt: skip


def rounded(x: FloatArray, to: str) -> FloatArray:
    """Returns float64 values rounded to fp16, bf16 or TF32.

    Args:
        x: Values.
        to: "fp16" or "bf16", to nearest with ties to even; or a conversion to TF32.
    """
    if to == "fp16":
        return np.asarray(x.astype(np.float16), dtype=np.float64)
    # bf16 has 8 and TF32 11 binary digits down to 2**-126, and one spacing below.
    digits = 8 if to == "bf16" else 11
    exponent = np.maximum(np.frexp(x)[1], -125)
    integer = _TO_INTEGER.get(to, np.rint)(np.ldexp(x, digits - exponent))
    return np.asarray(np.ldexp(integer, exponent - digits))


def replayed(x: FloatArray, e: FloatArray, to: str) -> tuple[FloatArray, FloatArray]:
    """Returns the middle of what ``rounded`` makes of [x - e, x + e], and the rest.

    A subnormal result may be flushed to zero, but not in fp16.
    """
    low, high = rounded(x - e, to), rounded(x + e, to)
    if to != "fp16":
        low = np.where((0 < low) & (low <= 2.0**-126), 0.0, low)
        high = np.where((-(2.0**-126) <= high) & (high < 0), 0.0, high)
    return (low + high) / 2, (high - low) / 2


def replayed_operand(
    x: FloatArray, e: FloatArray, to: str, units: Units
) -> tuple[FloatArray, FloatArray]:
    """Returns ``replayed``, with the loss of a tensor core where the operand may be subnormal."""
    middle, rest = replayed(x, e, to)
    smallest_normal = 2.0**-14 if to == "fp16" else 2.0**-126
    may_be = (np.abs(middle) - rest < smallest_normal) & (np.abs(middle) + rest > 0)
    return middle, rest + np.where(may_be, units.cut_off, 0.0)


_SEGMENT = 256  # the widest tile of a kernel whose sums run in order


def in_order_error(
    weights_rt: FloatArray, y_td: FloatArray, error_rd: FloatArray, size_rd: FloatArray, tile: int,
    units: Units,
) -> FloatArray:  # fmt: skip
    """Returns the error of the additions of weights @ y over consecutive tiles from either end.

    The sum passes through at most |S| + |T - S| + the |terms| around a segment. S is the sum before
    the segment, T the whole sum. ``error_rd`` is the error of its terms, ``size_rd`` the largest
    sum of |terms|.
    """
    total_rd, before_rd = weights_rt @ y_td, np.zeros_like(error_rd)
    count, passed_rd = 0.0, 3 * np.ceil(_SEGMENT / tile) * (tile + 2) * size_rd
    for start in range(0, weights_rt.shape[1], _SEGMENT):
        part = slice(start, start + _SEGMENT)
        additions = np.ceil(y_td[part].shape[0] / tile) * (tile + 2)
        passed_rd = passed_rd + additions * np.abs(before_rd)
        before_rd = before_rd + weights_rt[:, part] @ y_td[part]
        count += additions
    passed_rd = passed_rd + count * (np.abs(total_rd) + 2 * error_rd)
    lost = units.accumulator * units.u
    error: FloatArray = passed_rd * lost / (1 - count * lost) * (1 + units.u_cast_dot)
    return error
