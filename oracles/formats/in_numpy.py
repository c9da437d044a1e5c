"""Casts between float64 and codes in NumPy, by integer arithmetic on the bits of float64.

A second writing of ``in_torch.py``, which shares no code with it. Codes are unsigned bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.writing import Writing

__all__ = ["decoded", "encoded", "scales_written", "written"]

Array = NDArray[Any]
_FRACTION = (1 << 52) - 1
_MOST = 2.0**40  # beyond the range of every format, and far from that of the integers below


def encoded(
    x: Array, form: ElementFormat, rounding: str = "nearest", overflow: str = "saturate"
) -> Array:
    """Returns the codes of float64 numbers as unsigned bytes; see ``in_torch.encoded``.

    Raises:
        ValueError: x has NaN, and the format has none.
    """
    is_nan = np.isnan(x)
    if form.nan_code is None and is_nan.any():
        raise ValueError(f"x has NaN; {form.name} needs numbers")
    # 1. |x| = significand 2**exponent, in integers.
    size = np.minimum(np.where(is_nan, 0.0, np.abs(x)), _MOST)
    bits = size.astype(np.float64).view(np.int64)
    field = bits >> 52
    significand = (bits & _FRACTION) + np.where(field > 0, 1 << 52, 0)
    exponent = np.maximum(field, 1) - 1075
    # 2. The exponent of the last digit, and the digits that are cut off.
    if form.is_integer:
        leading = np.zeros_like(exponent)
    else:
        leading = np.maximum(exponent + 52, 1 - form.bias)
    shift = leading - form.mantissa - exponent
    # Nothing of 53 digits is left past 60 of them, not even a half.
    shift = np.minimum(shift, 60)
    whole = significand >> shift
    rest, half = significand - (whole << shift), np.left_shift(np.int64(1), shift - 1)
    # 3. Rounding. A carry into the exponent is right, because codes are consecutive.
    if rounding == "nearest":
        whole = whole + ((rest > half) | ((rest == half) & (whole & 1 == 1)))
    negative = np.signbit(x)
    if form.is_integer:
        signed = np.where(negative, -np.minimum(whole, 128), np.minimum(whole, 127))
        return np.asarray(signed.astype(np.uint8))
    assert form.overflow_code is not None
    assert form.nan_code is not None
    code = ((leading + form.bias - 1) << form.mantissa) + whole
    # 4. The end of the range, NaN and the sign. Toward 0 only infinity overflows.
    over = code > form.largest_code
    if overflow == "nan":
        beyond = over if rounding != "truncate" else np.isinf(x)
        code = np.where(beyond, form.overflow_code, np.where(over, form.largest_code, code))
    else:
        code = np.where(over, form.largest_code, code)
    code = np.where(is_nan, form.nan_code, code)
    return np.asarray((code + (negative.astype(np.int64) << 7)).astype(np.uint8))


def decoded(codes: Array, form: ElementFormat) -> Array:
    """Returns the float64 numbers of codes, which are unsigned bytes."""
    if form.is_integer:
        return np.asarray(codes.view(np.int8).astype(np.float64))
    code = (codes & 0x7F).astype(np.int64)
    field, fraction = code >> form.mantissa, code & ((1 << form.mantissa) - 1)
    normal = field > 0
    size = np.ldexp(
        np.where(normal, fraction + (1 << form.mantissa), fraction).astype(np.float64),
        np.maximum(field, 1) - form.bias - form.mantissa,
    )
    beyond = np.where(code == form.overflow_code, np.inf, np.nan)
    if form.overflow_code == form.nan_code:
        beyond = np.full_like(beyond, np.nan)
    size = np.where(code > form.largest_code, beyond, size)
    return np.asarray(np.where(codes >> 7 == 1, -size, size))


def scales_written(x: Array, form: ElementFormat, rule: Writing) -> Array:
    """Returns the scale of each token and head, float32; see ``in_torch.scales_written``."""
    largest = np.abs(x.astype(np.float32)).max(-1, initial=0.0)
    scale = np.divide(largest, np.float32(form.largest), dtype=np.float32)
    return np.asarray(np.maximum(scale, np.float32(rule.least_scale)))


def written(x: Array, scale: Array, form: ElementFormat, rule: Writing, *, divides: bool) -> Array:
    """Returns the codes of appended numbers as unsigned bytes; see ``in_torch.written``."""
    single = np.float32
    x, scale = x.astype(single), np.broadcast_to(scale, x.shape).astype(single)
    there = scale != 0
    if divides:
        number = x * scale
    else:
        number = np.zeros_like(x)
        if rule.by == "reciprocal":
            number[there] = x[there] * (single(1) / scale[there])
        else:
            number[there] = x[there] / scale[there]
    if rule.rounding == "half_added":
        number = np.copysign(np.abs(number) + single(0.5), number)
        return encoded(number.astype(np.float64), form, "truncate", rule.overflow)
    return encoded(number.astype(np.float64), form, rule.rounding, rule.overflow)
