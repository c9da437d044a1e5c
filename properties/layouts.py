"""Storage layouts: one logical tensor (B, heads, rows, columns) under different strides.

Whatever lies around a tensor's own elements (padding columns and rows, the element before an
offset) is NaN, so that a read out of bounds shows.
"""

from __future__ import annotations

import math

import torch

from oracles.problem import LAYOUTS

__all__ = ["lay_out"]

_EXTRA_COLUMNS = 8
_EXTRA_ROWS = 2


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Rows inside a buffer with extra columns, and extra rows before and after."""
    B, heads, rows, columns = values.shape
    buffer = values.new_full((B, heads, rows + 2 * _EXTRA_ROWS, columns + _EXTRA_COLUMNS), math.nan)
    view = buffer[:, :, _EXTRA_ROWS : _EXTRA_ROWS + rows, :columns]
    return view.copy_(values)


def _offset(values: torch.Tensor) -> torch.Tensor:
    """Contiguous from the second element of its storage on, so that no pointer is aligned."""
    buffer = values.new_full((values.numel() + 2,), math.nan)
    return buffer[1:-1].view(values.shape).copy_(values)


def _expanded(values: torch.Tensor) -> torch.Tensor:
    """One head, shown with stride 0 as all of them."""
    first = values[:, :1]
    if not bool(((values == first) | ((values != values) & (first != first))).all()):
        raise ValueError("values differ between heads; layout 'expanded' needs equal heads")
    return first.clone(memory_format=torch.contiguous_format).expand(values.shape)


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Copies values into new storage with the strides that a layout stands for.

    ========  ============================================================================
    bhsd      contiguous
    bshd      a transposed view of (B, rows, heads, columns)
    padded    rows in a larger buffer: extra columns, extra rows before and after
    offset    contiguous, but its storage begins one element earlier (unaligned pointers)
    expanded  stride 0 over the heads, which must be equal; one head is bhsd
    ========  ============================================================================

    Args:
        values: (B, heads, rows, columns), any dtype and strides; sizes may be 0.
        layout: One of ``oracles.problem.LAYOUTS``.

    Returns:
        A tensor equal to values (NaN where they are NaN), same shape, dtype and device.

    Raises:
        ValueError: The layout is unknown, or "expanded" and the heads differ.
    """
    if layout == "bhsd":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "bshd":
        return values.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    if layout == "padded":
        return _padded(values)
    if layout == "offset":
        return _offset(values)
    if layout == "expanded":
        return _expanded(values)
    raise ValueError(f"layout is {layout!r}; needs one of {LAYOUTS}")
