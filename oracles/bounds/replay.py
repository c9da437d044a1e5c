"""Roundings that are computed instead of being bounded, and additions bounded by running sums.

Let a value be known up to an error e that is small against the spacing of a format. Its rounding is
known too, unless the value lies near the middle of two neighbours. There it is one of both. A
conversion to TF32 is such a rounding, to nearest or toward 0.

An addition errs by u of its result. The results of a sum over consecutive tiles are its running
sums, which are far smaller than the sums of |terms| that an arbitrary order could reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import hardshrink

from fa_verify.oracles.outputs import Numerics

__all__ = [
    "SEGMENT",
    "Format",
    "additions",
    "cast_format",
    "lost_of_running",
    "nearest",
    "operand_format",
    "power_of_two",
    "running_sums",
    "stored_format",
]

# Rows or keys between two running sums. The tiles of a kernel are at most as wide.
SEGMENT = 256
_EXPONENT = 0x7FF << 52  # the bits of a float64 number that hold its exponent


@dataclass(frozen=True)
class Format:
    """A short format to which values are rounded.

    Args:
        u: Its unit roundoff.
        smallest: Spacing of its subnormal numbers.
        flushed: Results of at most this magnitude may count as 0.
        how: "nearest", with ties to even; "nearest_away", with ties away from 0; or "truncate".
    """

    u: float
    smallest: float
    flushed: float
    how: str = "nearest"

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float64 values rounded to the format."""
        if self.how == "nearest":
            return nearest(x, self.u, self.smallest)
        unit = _spacing(x, self.u, self.smallest)
        units = x / unit
        whole = units.trunc()
        if self.how == "nearest_away":
            whole += torch.where((units - whole).abs() >= 0.5, units.sign(), 0.0)
        return whole.mul_(unit)

    def between(self, x: torch.Tensor, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the middle and half the width of what values within e of x are rounded to."""
        ends = self.rounded(torch.stack([x - e, x + e]))
        low, high = ends
        if self.flushed:
            # A positive low end, or a negative high one, may count as 0.
            flushed_low, flushed_high = hardshrink(ends, self.flushed)
            low, high = torch.minimum(low, flushed_low), torch.maximum(high, flushed_high)
        return (low + high).div_(2), (high - low).div_(2)

    def operand(
        self, x: torch.Tensor, e: torch.Tensor, eta_a: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``between``, and its error as an operand of tensor cores.

        Args:
            x: Values.
            e: Their errors.
            eta_a: The error of a subnormal operand, of ``Constants``.
        """
        middle, width = self.between(x, e)
        size = middle.abs()
        subnormal = (size - width < self.smallest / (2 * self.u)) & size.logical_or(width)
        return middle, width.add_(subnormal, alpha=eta_a)


# Subnormal bfloat16 numbers are subnormal as float32, which arithmetic may flush.
_FORMATS = {
    "fp16": Format(2.0**-11, 2.0**-24, 0.0),
    "bf16": Format(2.0**-8, 2.0**-133, 2.0**-126),
}
_TF32 = {
    how: Format(2.0**-11, 2.0**-136, 2.0**-126, how)
    for how in ("truncate", "nearest", "nearest_away")
}


def stored_format(in_dtype: str) -> Format | None:
    """Returns the format of stored gradients, or None: fp32 and fp64 are that of the sums."""
    return _FORMATS.get(in_dtype)


def operand_format(in_dtype: str, numerics: Numerics) -> Format | None:
    """Returns the format that TF32 dots convert their operands to, if that is known; or None.

    A prescaled operand is rounded before its conversion, which is not replayed.
    """
    if in_dtype != "fp32" or numerics.dots != "tf32" or numerics.prescales != "none":
        return None
    return _TF32.get(numerics.tf32_conversion)


def cast_format(in_dtype: str, numerics: Numerics) -> Format | None:
    """Returns the format that P and dS are rounded to once before their dots, or None."""
    if numerics.ds_roundings != 1:
        return None
    converted = operand_format(in_dtype, numerics)
    if converted is not None or numerics.p_dtype != "input":
        return converted
    return _FORMATS.get(in_dtype)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest power of two that is at most |x|, float64; 0 for subnormal numbers."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)


def _spacing(x: torch.Tensor, u: float, smallest: float) -> torch.Tensor:
    """Returns the distance of neighbours in a format around each float64 value."""
    return power_of_two(x).mul_(2 * u).clamp_(min=smallest)


def nearest(x: torch.Tensor, u: float, smallest: float) -> torch.Tensor:
    """Returns float64 values rounded to nearest, with ties to even.

    Args:
        x: Values, float64, any shape.
        u: Unit roundoff of the format.
        smallest: Spacing of the format's subnormal numbers.
    """
    unit = _spacing(x, u, smallest)
    return (x / unit).round_().mul_(unit)


def additions(terms: int, tile: int) -> float:
    """Returns the number of additions of a sum of ``terms`` by tiles, two of them for each tile."""
    return -(-terms // tile) * (tile + 2.0)


def running_sums(
    weights: torch.Tensor,
    y: torch.Tensor,
    tile: int,
    before: torch.Tensor | None = None,
    zeros: int = 0,
) -> torch.Tensor:
    """Returns |the sum before a segment| times its additions, added up over the segments.

    The sum is ``weights @ y``, (Z, R, D), by tiles of its terms.

    Args:
        weights: (Z, R, N).
        y: (Z, N, D).
        tile: Width of a tile.
        before: (Z, R, D), the sum of earlier terms, if any.
        zeros: Number of later terms, all of them 0.
    """
    result = y.new_zeros(*weights.shape[:2], y.shape[2])
    terms = weights.shape[2]
    for start in range(0, terms, SEGMENT):
        if start > 0:
            last = slice(start - SEGMENT, start)
            part = weights[:, :, last] @ y[:, last]
            before = part if before is None else before + part
        if before is not None:
            result += additions(min(SEGMENT, terms + zeros - start), tile) * before.abs()
    end = terms + -terms % SEGMENT
    if end < terms + zeros:
        total = weights[:, :, end - SEGMENT :] @ y[:, end - SEGMENT :]
        total = total if before is None else before + total
        whole, rest = divmod(terms + zeros - end, SEGMENT)
        result += (whole * additions(SEGMENT, tile) + additions(rest, tile)) * total.abs()
    return result


def lost_of_running(
    total: torch.Tensor,
    running: torch.Tensor,
    errors: torch.Tensor,
    sizes: torch.Tensor,
    *,
    count: float,
    tile: int,
    hu: float,
) -> torch.Tensor:
    """Returns the error of a sum over consecutive tiles, from either end.

    At any time such a sum T holds at most |S| + |T| + the |terms| around it: S is the sum before a
    segment, and a tile of up to ``SEGMENT`` terms reaches into the next segment.

    Args:
        total: T.
        running: ``running_sums``.
        errors: The sum of the terms' errors.
        sizes: The sum of the largest |terms| of a correct kernel.
        count: Number of additions of the whole sum.
        tile: Width of a tile.
        hu: Error of one addition, relative to its result.
    """
    around = 3 * additions(SEGMENT, tile)
    reached = total.abs().add_(errors, alpha=2)
    largest = torch.add(running, reached, alpha=count).add_(sizes, alpha=around)
    return largest.mul_(hu / (1 - count * hu))
