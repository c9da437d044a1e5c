"""Rounding in NumPy to bfloat16 (as uint16 bits), to TF32, and to odd."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "fma_bf16",
    "nearest_bf16",
    "step_toward_zero",
    "to_odd_fp32",
    "tree_sum_16_bit",
    "truncate_to_tf32",
    "widen_bf16",
]

# Arrays of any element type. The docstrings name the types.
Array = npt.NDArray[Any]


def widen_bf16(bits: Array) -> Array:
    """Convert bfloat16 bits (uint16) to the same values in float32."""
    values: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def to_odd_fp32(values: Array) -> Array:
    """Round float64 to float32, an inexact value to the neighbour whose last bit is 1.

    Rounding the result again to fewer bits gives the same as rounding the float64 once.

    Source: Boldo and Melquiond 2008 (doi 10.1109/TC.2007.70819).
    """
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    even = (bits & 1) == 0
    magnitude, exact = np.abs(nearest.astype(np.float64)), np.abs(values)
    odd: Array = bits + (even & (magnitude < exact)) - (even & (magnitude > exact))
    return odd.view(np.float32)


def nearest_bf16(values: Array) -> Array:
    """Round to the nearest bfloat16 and return its bits (uint16).

    Args:
        values: Floats, or integers below 2**53 in magnitude. Each is rounded once, ties to even;
            NaN becomes a quiet NaN.
    """
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    elif values.dtype != np.float32:
        values = to_odd_fp32(values.astype(np.float64))
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x0040, rounded).astype(np.uint16)


def step_toward_zero(values: Array, nearest: Array, widened: Array) -> Array:
    """Return values rounded toward zero, given the same values rounded to nearest.

    Args:
        values: Floats.
        nearest: The nearest values of a narrower type: floats, or bfloat16 bits.
        widened: ``nearest`` as floats.
    """
    bits = nearest.view(f"u{nearest.itemsize}")
    beyond = np.abs(widened.astype(values.dtype)) > np.abs(values)
    # The bits below Inf are the largest finite value, the result of truncating an overflow.
    truncated: Array = bits - beyond
    return truncated.view(nearest.dtype)


def truncate_to_tf32(values: Array) -> Array:
    """Clear the low 13 bits of the mantissa of float32, as an H200 does for TF32."""
    truncated = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(values), values, truncated)


def fma_bf16(x: Array, y: Array, z: Array) -> Array:
    """Return the bits of x * y + z, rounded once to bfloat16.

    The product is exact in float64. The sum is rounded to odd, as in ``to_odd_fp32``.

    Args:
        x: First factor, float32 that holds bfloat16 values.
        y: Second factor, as x.
        z: Addend, as x.
    """
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    addend = total - product
    lost = (product - (total - addend)) + (
        z - addend
    )  # TwoSum: the exact rounding error of the sum
    inexact = np.isfinite(total) & (lost != 0) & ((total.view(np.int64) & 1) == 0)
    return nearest_bf16(np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total))


def tree_sum_16_bit(data: Array, axis: int | None, keep_dims: bool) -> Array:
    """Return the sum along an axis, as a tree of halves with a rounding after every addition.

    Args:
        data: Float16 or bfloat16 bits (uint16); its length along the axis is a power of two.
        axis: The axis; None sums all elements.
        keep_dims: Whether summed axes stay, with length 1.
    """
    rank = data.ndim
    data = data.ravel() if axis is None else np.moveaxis(data, axis, 0)
    while len(data) > 1:
        lower, upper = np.split(data, 2)
        if data.dtype == np.uint16:
            data = nearest_bf16(widen_bf16(lower) + widen_bf16(upper))
        else:
            data = lower + upper
    if not keep_dims:
        return np.asarray(data[0])
    return data.reshape((1,) * rank) if axis is None else np.moveaxis(data, 0, axis)
