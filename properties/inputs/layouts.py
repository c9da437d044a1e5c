"""Storage layouts: one logical tensor (B, heads, rows, columns) with different strides.

Every layout lies in a larger storage, whose other elements hold a value of the caller's choice. NaN
detects reads out of bounds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fa_verify.oracles.problem import LAYOUTS

__all__ = ["WITH_WHOLE_ROWS", "lay_out", "strides_of"]

# Layouts in which each row is contiguous and begins on 16 bytes, if it has whole 16 bytes.
WITH_WHOLE_ROWS = ("bhsd", "bshd", "padded", "expanded", "packed")

_MARGIN = 128  # bytes before the first element and after the last, at least
_ALIGNMENT = 16  # alignment of the first element in bytes
_EXTRA_COLUMNS = 8
_EXTRA_ROWS = 2
_PACKED = 3  # tensors in packed storage (q, k, v); the tensor is the middle one


class _Form(NamedTuple):
    """The geometry of a layout, counted in elements."""

    strides: tuple[int, int, int, int]
    lead: int  # elements of the larger buffer before the first one
    size: int  # elements of the larger buffer, lead included


def _form(layout: str, B: int, heads: int, rows: int, columns: int) -> _Form:
    """Return the strides of a layout and the extent of its buffer."""
    elements = B * heads * rows * columns
    match layout:
        case "bhsd" | "offset" | "expanded":
            return _Form((heads * rows * columns, rows * columns, columns, 1), 0, elements)
        case "bshd":
            return _Form((rows * heads * columns, columns, heads * columns, 1), 0, elements)
        case "padded":
            width, height = columns + _EXTRA_COLUMNS, rows + 2 * _EXTRA_ROWS
            strides = (heads * height * width, height * width, width, 1)
            return _Form(strides, _EXTRA_ROWS * width, B * heads * height * width)
        case "packed":
            width = _PACKED * heads * columns
            strides = (rows * width, columns, width, 1)
            return _Form(strides, heads * columns, _PACKED * elements)
        case "transposed":
            return _Form((heads * columns * rows, columns * rows, 1, rows), 0, elements)
        case "strided":
            strides = (heads * 4 * rows * columns, 4 * rows * columns, 4 * columns, 2)
            return _Form(strides, 0, 4 * elements)
    raise ValueError(f"layout is {layout!r}; needs one of {LAYOUTS}")


def strides_of(layout: str, *sizes: int) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor (B, heads, rows, columns) in a layout."""
    if layout == "expanded":  # one head is stored
        batch, _, *inner = _form(layout, sizes[0], 1, *sizes[2:]).strides
        return batch, 0, *inner
    return _form(layout, *sizes).strides


def _one_head(values: torch.Tensor) -> torch.Tensor:
    """Return the first head; raise ValueError if the heads differ."""
    first = values[:, :1]
    if values.shape[1] > 1 and values.stride(1) != 0:
        same = (values == first) | ((values != values) & (first != first))
        if not bool(same.all()):
            raise ValueError("values differ between heads; layout 'expanded' needs equal heads")
    return first


def lay_out(values: torch.Tensor, layout: str, around: float = math.nan) -> torch.Tensor:
    """Copy values into new storage with the strides of a layout.

    ==========  ==========================================================================
    bhsd        contiguous
    bshd        a transposed view of (B, rows, heads, columns)
    padded      rows in a larger buffer: extra columns, extra rows before and after
    offset      contiguous, but one element past an aligned address
    expanded    stride 0 over the heads, which must be equal; one head is bhsd
    packed      the middle one of three in (B, rows, 3, heads, columns), as in packed qkv
    transposed  a transposed view of (B, heads, columns, rows): columns are not adjacent
    strided     every second row and every second column of a larger buffer
    ==========  ==========================================================================

    At least 128 bytes of the storage lie before the first and after the last element. The address
    of the first element is a multiple of 16 bytes, except for "offset".

    Args:
        values: (B, heads, rows, columns), any floating dtype and strides; sizes may be 0.
        layout: One of ``fa_verify.oracles.problem.LAYOUTS``.
        around: Value of the storage outside of the tensor's elements.

    Returns:
        A tensor equal to values (NaN where they are NaN), same shape, dtype and device.

    Raises:
        ValueError: The layout is unknown, or "expanded" and the heads differ.
    """
    B, heads, rows, columns = values.shape
    if layout == "expanded":
        values = _one_head(values)
    form = _form(layout, *values.shape)
    margin, unit = (size // values.element_size() for size in (_MARGIN, _ALIGNMENT))
    start = -(-(margin + form.lead) // unit) * unit + (layout == "offset")
    buffer = values.new_full((start + form.size - form.lead + margin,), around)
    laid = buffer.as_strided(values.shape, form.strides, start).copy_(values)
    return laid.expand(B, heads, rows, columns) if layout == "expanded" else laid
