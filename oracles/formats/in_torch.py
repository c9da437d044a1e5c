"""Casts between float64 and codes in PyTorch, by a table of the format's numbers."""

from __future__ import annotations

from functools import cache

import torch

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.writing import Writing

__all__ = ["decoded", "encoded", "scales_written", "written"]


@cache
def _magnitudes(form: ElementFormat, device: str) -> torch.Tensor:
    """Returns the numbers >= 0 in ascending order, and the one that would follow the largest.

    The index of a number is its code. An integer has one more, for -128.
    """
    last = form.largest_code + form.is_integer
    finite = [form.magnitude(code) for code in range(last + 1)]
    # The spacing does not change at the end of the table.
    finite.append(2 * finite[-1] - finite[-2])
    return torch.tensor(finite, dtype=torch.float64, device=device)


def encoded(
    x: torch.Tensor, form: ElementFormat, rounding: str = "nearest", overflow: str = "saturate"
) -> torch.Tensor:
    """Returns the codes of float64 numbers, of the format's dtype and the shape of x.

    Args:
        x: Float64; NaN has to be absent for a format without it.
        form: The format.
        rounding: One of ``ROUNDINGS``. Toward 0, no finite number overflows.
        overflow: One of ``OVERFLOWS``. A format without a code for it saturates.

    Raises:
        ValueError: x has NaN, and the format has none.
    """
    if form.nan_code is None and bool(x.isnan().any()):
        raise ValueError(f"x has NaN; {form.name} needs numbers")
    table = _magnitudes(form, str(x.device))
    size = x.abs().masked_fill(x.isnan(), 0.0)
    # 1. The neighbours below and above; twice their middle is their exact sum.
    below = torch.searchsorted(table, size, right=True).sub_(1).clamp_(max=len(table) - 2)
    twice, middle = 2 * size, table[below] + table[below + 1]
    # 2. The choice between them.
    if rounding == "nearest":
        up = (twice > middle) | ((twice == middle) & (below % 2 == 1))
    else:
        up = (size == torch.inf) & (overflow == "nan")
    code = below + up
    # 3. The end of the range, NaN and the sign.
    negative = x.signbit()
    if form.is_integer:
        code = torch.where(negative, -code.clamp(max=128), code.clamp(max=127))
        return code.to(torch.int8)
    assert form.overflow_code is not None
    assert form.nan_code is not None
    beyond = form.largest_code if overflow == "saturate" else form.overflow_code
    code = torch.where(code > form.largest_code, beyond, code)
    code = torch.where(x.isnan(), form.nan_code, code) + 128 * negative
    return code.to(torch.uint8).view(form.dtype)


@cache
def _numbers(form: ElementFormat, device: str) -> torch.Tensor:
    """Returns the float64 number of every code, read as an unsigned byte."""
    if form.is_integer:
        numbers = [float(code - 256 * (code > 127)) for code in range(256)]
    else:
        sizes = [form.magnitude(code) for code in range(form.largest_code + 1)]
        sizes += [torch.nan] * (128 - len(sizes))
        if form.overflow_code is not None and form.overflow_code != 0x7F:
            sizes[form.overflow_code] = torch.inf
        numbers = [*sizes, *(-size for size in sizes)]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def decoded(codes: torch.Tensor, form: ElementFormat) -> torch.Tensor:
    """Returns the float64 numbers of codes, which are a tensor of the format's dtype."""
    return _numbers(form, str(codes.device))[codes.view(torch.uint8).to(torch.int64)]


def scales_written(x: torch.Tensor, form: ElementFormat, rule: Writing) -> torch.Tensor:
    """Returns the scale of each token and head, float32, of x (..., columns).

    Args:
        x: Float64, the numbers of 16 or 32 bits that are appended.
        form: The format.
        rule: The rule.
    """
    largest = x.abs().amax(-1).to(torch.float32)
    return (largest / form.largest).clamp(min=rule.least_scale)


def written(
    x: torch.Tensor, scale: torch.Tensor, form: ElementFormat, rule: Writing, *, divides: bool
) -> torch.Tensor:
    """Returns the codes of appended numbers, of the format's dtype.

    Args:
        x: Float64, the numbers of 16 or 32 bits that are appended.
        scale: Float32, broadcasts to x.
        form: The format.
        rule: The rule.
        divides: Whether a code is divided by the scale where it is read, so that x is multiplied
            by it.
    """
    number = x.to(torch.float32)
    if divides:
        number = number * scale
    elif rule.by == "reciprocal":
        number = number * scale.reciprocal()
    else:
        number = number / scale
    number = torch.where(scale == 0, torch.zeros_like(number), number)
    rounding = rule.rounding
    if rounding == "half_added":
        number, rounding = number + torch.where(number < 0, -0.5, 0.5), "truncate"
    return encoded(number.to(torch.float64), form, rounding, rule.overflow)
