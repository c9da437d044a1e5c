"""Casts to and from e4m3 and e5m2 (``fp8e4nv``, ``fp8e5``), as GPUs make them.

The interpreter of Triton 3.9 casts 600 to 288 in e4m3: it neither saturates nor rounds ties to
even, and it reads the code of NaN as 480. ``cvt.rn.satfinite`` rounds to nearest with ties to
even, and gives the largest number for one beyond it and for infinity.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["EIGHT_BIT_FLOATS", "Layout", "read", "saturated"]

Array = npt.NDArray[Any]


class Layout(NamedTuple):
    """The layout of a format of 8 bits.

    Args:
        mantissa: Bits of the mantissa.
        bias: Bias of the exponent.
        largest: Code of the largest finite number. Codes above it hold infinity, if ``infinite``,
            and NaN.
        infinite: Whether the code after ``largest`` is infinity.
    """

    mantissa: int
    bias: int
    largest: int
    infinite: bool


# By the names of Triton's types. The code 0x7F is NaN in both.
EIGHT_BIT_FLOATS = {"fp8e4nv": Layout(3, 7, 0x7E, False), "fp8e5": Layout(2, 15, 0x7B, True)}


@cache
def _values(name: str) -> Array:
    """Return the float32 value of every code."""
    mantissa, bias, largest, infinite = EIGHT_BIT_FLOATS[name]
    codes = np.arange(128)
    field, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    whole = fraction + (field > 0) * (1 << mantissa)
    values = np.ldexp(whole.astype(np.float32), np.maximum(field, 1) - bias - mantissa)
    values[largest + 1 :] = np.nan
    if infinite:
        values[largest + 1] = np.inf
    return np.concatenate([values, -values])


def read(codes: Array, name: str) -> Array:
    """Return codes (uint8) as float32, exactly."""
    values: Array = _values(name)[codes]
    return values


@cache
def _middles(name: str) -> Array:
    """Return the middles between each two finite numbers >= 0, float64 and exact."""
    numbers = _values(name)[: EIGHT_BIT_FLOATS[name].largest + 1].astype(np.float64)
    middles: Array = (numbers[1:] + numbers[:-1]) / 2
    return middles


def saturated(values: Array, name: str, *, toward_zero: bool = False) -> Array:
    """Return the codes (uint8) of floats, rounded once.

    Args:
        values: Floats.
        name: The name of the type.
        toward_zero: Round toward zero, not to the nearest with ties to even.
    """
    wide = values.astype(np.float64)
    size, middles = np.abs(wide), _middles(name)
    if toward_zero:
        numbers = _values(name)[: len(middles) + 1].astype(np.float64)
        codes = np.searchsorted(numbers, size, side="right") - 1
    else:
        above = np.searchsorted(middles, size, side="right")
        below = np.searchsorted(middles, size, side="left")
        # On a middle both searches differ, and the even code is that of the tie.
        codes = np.where(above % 2 == 0, above, below)
    codes = np.where(np.isnan(wide), 0x7F, codes)
    result: Array = (codes | (np.signbit(wide).astype(np.int64) << 7)).astype(np.uint8)
    return result
