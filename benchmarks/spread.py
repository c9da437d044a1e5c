"""Formats measurements. It imports neither torch nor Triton, which read the environment."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["spread"]


def spread(values: Sequence[float]) -> str:
    """Formats values as "median [lowest, highest]" with three decimals."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"
