"""What the NumPy bound is made of: the unit roundoffs of a kernel, and how often each can strike.

The roundoffs follow from the dtype and from what a subject declares; the counts (tiles that a sum
runs through, rescales of the accumulator) follow from the data. Axes in the names of locals: m
query row, n key, d head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.numpy_reference import Head

__all__ = ["Units", "lag_of", "prescale_underflow", "rescales", "seen_tiles", "units_of"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Unit roundoff, and half the distance of subnormals (fp16) or the smallest normal (the others may
# flush to zero).
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
        flush: Below it, results may be flushed to zero.
        u_exp: Relative error of the exponential.
        u_log: Error of the logarithm, relative to 1 + its value.
        u_cast: Unit roundoff of the casts of P and dS, all of them together.
        eta_cast: What those casts lose to underflow.
        u_stored: Unit roundoff of tensors in memory.
        eta_stored: What storing loses to underflow.
        u_x: What a dot does to each of its operands beyond their dtype, relative.
        eta_x: The same for subnormal operands, absolute.
        flush_op: Elementwise operands and results below it may be flushed, beside casts, P, dS.
        accumulator: h, the accumulation constant of a dot.
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
    eta_x: float
    flush_op: float
    accumulator: float

    @property
    def u_dot(self) -> float:
        """The two operands of a dot, as the dot reads them: (1 + u_x)^2 - 1."""
        return 2 * self.u_x + self.u_x**2

    def subnormal_operands(self, a_rd: FloatArray, b_ce: FloatArray) -> FloatArray:
        """(R, C): what their subnormal elements cost the dots of the rows of a and b."""
        sums_rc: FloatArray = np.abs(a_rd).sum(axis=1)[:, None] + np.abs(b_ce).sum(axis=1)[None, :]
        return self.eta_x * (1 + self.u_dot) * sums_rc

    @property
    def u_cast_dot(self) -> float:
        """The same where one operand was cast before: (1 + u_cast)(1 + u_x)^2 - 1."""
        return self.u_cast + self.u_dot + self.u_cast * self.u_dot

    def gamma(self, n: npt.ArrayLike) -> FloatArray:
        """n additions in the accumulator's format, IEEE: n u / (1 - n u)."""
        n_u: FloatArray = np.asarray(n, dtype=np.float64) * self.u
        return np.asarray(n_u / (1 - n_u))

    def g(self, n: npt.ArrayLike) -> FloatArray:
        """A dot of length n: gamma of h n."""
        return self.gamma(self.accumulator * np.asarray(n, dtype=np.float64))


def units_of(in_dtype: str, numerics: Numerics) -> Units:
    """Returns the constants that belong to a dtype and to what a subject declares.

    Args:
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: What the kernel declares. p_dtype is ignored for "fp64", whose P stays float64;
            dots for all but "fp32".

    Raises:
        ValueError: An unknown in_dtype.
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
    return Units(
        u=2.0**-53 if double else 2.0**-24,
        flush=flush,
        u_exp=2.0**-51 if double else 2.0**-22,
        u_log=2.0**-51 if double else 2.0**-22,
        u_cast=float(np.expm1(r * np.log1p(u_p))),
        eta_cast=r * eta_p,
        u_stored=u_stored,
        eta_stored=eta_stored,
        u_x=2.0**-10 if numerics.dots == "tf32" and in_dtype == "fp32" else 0.0,
        # 13 bits dropped of a number whose last bit is 2**-149
        eta_x=2.0**-136 if numerics.dots == "tf32" and in_dtype == "fp32" else 0.0,
        flush_op=numerics.flushes * flush,
        accumulator=float(numerics.accumulator),
    )


def prescale_underflow(numerics: Numerics, sm_scale: float, units: Units) -> float:
    """Returns what eta, lost by an element of a pre-scaled operand, becomes in a score or gradient.

    An operand that carries all of t log2(e) is freed of log2(e), so the loss is multiplied by ln 2:
    in the score, whose base is 2, and in the gradient that reads the operand again. Where both are
    pre-scaled, each may carry a square root: the score is multiplied by the other's share as well,
    sqrt(t / ln 2) ln 2, and so is the gradient, t / sqrt(t / ln 2)::

        eta ln 2                            "q", "k"
        eta max(ln 2, sqrt(t ln 2))         "qk"

    Args:
        numerics: What the kernel declares.
        sm_scale: t, the factor on q.k, > 0.
        units: The constants in force.
    """
    ln2 = math.log(2.0)
    factor = max(ln2, math.sqrt(sm_scale * ln2)) if numerics.prescales == "qk" else ln2
    # An operand of the product with the scale may itself be flushed.
    return (units.eta_stored + units.flush_op * max(1.0, sm_scale / ln2)) * factor


def seen_tiles(seen_mn: BoolArray, width: int) -> FloatArray:
    """Returns (M,), how many tiles of ``width`` columns hold a visible pair in each row."""
    count_m = np.zeros(seen_mn.shape[0])
    for start in range(0, seen_mn.shape[1], width):
        count_m += seen_mn[:, start : start + width].any(axis=1)
    return count_m


def lag_of(head: Head, numerics: Numerics) -> FloatArray:
    """Returns (M,), r: by how much the maximum in use may lie below the row's, in natural units.

    Where all that a row sees is in one tile there is none from before.

    Args:
        head: The passes of the reference.
        numerics: What the kernel declares: its threshold, and the width of the key tiles.
    """
    several_m = seen_tiles(head.seen_mn, numerics.block_n) > 1
    return np.where(several_m, numerics.rescale_threshold * math.log(2.0), 0.0)


def _possible_changes(tile_max: list[float], slack: float) -> int:
    """How often the running maximum may change after the first tile, up to ``slack`` of error."""
    changes = 0
    running = tile_max[0]
    for here in tile_max[1:]:
        changes += here >= running - slack
        running = max(running, here)
    return changes


def _possible_changes_of_parts(tile_max: list[float], slack: float) -> int:
    """The same where any tiles that follow each other can be a part, which is merged afterwards.

    The merge is one change more, of a part that lacks a tile: so they are fewer than the tiles.
    """
    tiles = len(tile_max)
    most = 0
    for first in range(tiles):
        for last in range(first + 1, tiles + 1):
            most = max(most, _possible_changes(tile_max[first:last], slack))
    return min(most + 1, tiles - 1)


def rescales(head: Head, error_mn: FloatArray, numerics: Numerics) -> FloatArray:
    """Returns (M,), R: how often the running maximum of a row can change.

    Tiles are visited from either end, and the worse of the two counts. A maximum that is only
    nearly reached may count as a change, because each score has an error.

    Args:
        head: The passes of the reference.
        error_mn: (M, N) errors of the scores, >= 0.
        numerics: What the kernel declares: the width of the key tiles, and whether they are split.
    """
    block_n = numerics.block_n
    changes = _possible_changes if numerics.splits == 1 else _possible_changes_of_parts
    M, N = head.seen_mn.shape
    count_m = np.zeros(M)
    for m in range(M):
        seen_n = head.seen_mn[m]
        if not seen_n.any():
            continue
        slack = 2 * float(error_mn[m, seen_n].max())
        tile_max = []
        for start in range(0, N, block_n):
            tile = slice(start, start + block_n)
            if seen_n[tile].any():
                tile_max.append(float(head.scores_mn[m, tile][seen_n[tile]].max()))
        count_m[m] = max(changes(tile_max, slack), changes(tile_max[::-1], slack))
    return count_m
