"""Errors in units of their bounds, in which NaN never passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["are_finite", "largest_ratios", "ratios"]


def ratios(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return ``|got - want| / bound`` in float64; NaN gives infinity, equal infinities give 0."""
    got = got.to(torch.float64)
    ratio = (got - want).abs_() / bound
    return ratio.masked_fill_(got == want, 0.0).nan_to_num_(torch.inf, torch.inf)


def largest_ratios(
    of_outputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], parts: int = 1
) -> list[list[float]]:
    """Return the largest ratio of each output, 0 for no element, in parts of the first axis.

    On a GPU, operations on all outputs at once take less time than those on each.

    Args:
        of_outputs: Each output's values, its true values and their bounds, of one shape; the last
            two are float64.
        parts: The number of equal parts.

    Returns:
        For each output, the largest ratio of each part.
    """
    if not of_outputs:
        return []
    got, want, bound = zip(*of_outputs, strict=True)
    joined = (
        torch.cat([x.reshape(parts, -1) for x in tensors], 1)
        for tensors in ([x.to(torch.float64) for x in got], want, bound)
    )
    sizes = [x.numel() // parts for x in got]
    largest = [
        ratio.amax(1) if size else ratio.new_zeros(parts)
        for ratio, size in zip(ratios(*joined).split(sizes, 1), sizes, strict=True)
    ]
    # One transfer for all outputs.
    found: list[list[float]] = torch.stack(largest).tolist()
    return found


def are_finite(*bounds: torch.Tensor) -> bool:
    """Return whether all bounds are finite; they are sums of terms that are not negative."""
    joined = torch.cat([x.reshape(-1) for x in bounds])
    return not joined.numel() or math.isfinite(joined.amax())
