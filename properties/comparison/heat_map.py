"""Where in a tensor the errors lie: one head, coarse enough to be kept and drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HeatMap"]

# Cells across; longer axes are pooled, each cell keeping its largest value.
MOST = 128


@dataclass(frozen=True)
class HeatMap:
    """The badness of one head of an output, the worst element's.

    Args:
        values: A line for each row of cells, three digits; None where it is infinite, or NaN.
        rows: Of the tensor.
        columns: Of the tensor; 1 for lse.
        axis: What rows are: "m" or "n".
        tile: Rows of a tile.
        head: Which one, "b=0 h=1".
        is_ratio: Whether values are error/bound; else they are plain differences.
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
        """Pools the head of an element.

        Args:
            badness: (B, H, rows) or (B, H, rows, columns), >= 0; NaN counts as infinite.
            index: Of the element.
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
        """Plain lists and numbers, to send between processes."""
        return {**vars(self), "values": [list(line) for line in self.values]}


def _digits(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
