"""A coarse map of the errors in one head of a tensor, small enough to store and draw."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HeatMap"]

# Largest number of cells per axis. Longer axes are max-pooled.
MOST = 128


@dataclass(frozen=True)
class HeatMap:
    """The errors in the head of an output that contains the worst element.

    Args:
        values: The cells by row, rounded to three digits; None for infinity and NaN.
        rows: Number of rows of the tensor.
        columns: Number of columns of the tensor; 1 for lse.
        axis: Axis of the rows, "m" or "n".
        tile: Rows per tile.
        head: The head, such as "b=0 h=1".
        is_ratio: Whether values are error/bound; otherwise they are absolute differences.
    """

    values: tuple[tuple[float | None, ...], ...]
    rows: int
    columns: int
    axis: str
    tile: int
    head: str
    is_ratio: bool

    @classmethod
    def of(
        cls, badness: torch.Tensor, index: tuple[int, ...], axis: str, tile: int, *, is_ratio: bool
    ) -> HeatMap:
        """Return the heat map of the head that contains an element.

        Args:
            badness: (B, H, rows) or (B, H, rows, columns), >= 0; NaN counts as infinite.
            index: Index of the element.
            axis: See ``HeatMap``.
            tile: See ``HeatMap``.
            is_ratio: See ``HeatMap``.
        """
        b, h = index[:2]
        head = badness[b, h].to(torch.float64)
        head = torch.where(head.isnan(), math.inf, head)
        head = head.unsqueeze(1) if head.ndim == 1 else head
        rows, columns = head.shape
        cells = torch.nn.functional.adaptive_max_pool2d(
            head[None, None], (min(rows, MOST), min(columns, MOST))
        )
        values = tuple(tuple(map(_digits, line)) for line in cells[0, 0].tolist())
        return cls(values, rows, columns, axis, tile, f"b={b} h={h}", is_ratio)

    def record(self) -> dict[str, Any]:
        """Convert to plain lists and numbers, to send between processes."""
        return {**vars(self), "values": [list(line) for line in self.values]}


def _digits(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
