"""Errors in units of their bounds, in which NaN never passes."""

from __future__ import annotations

import torch

__all__ = ["ratios", "worst", "worst_of_parts"]


def ratios(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return ``|got - want| / bound`` in float64; NaN gives infinity, equal infinities give 0."""
    got = got.to(torch.float64)
    ratio = (got - want).abs_() / bound
    return ratio.masked_fill_(got == want, 0.0).nan_to_num_(torch.inf, torch.inf)


def worst(*of_ratios: torch.Tensor) -> list[float]:
    """Return the largest ratio of each tensor, 0 for an empty one. Synchronises a GPU once."""
    return [largest for (largest,) in worst_of_parts(1, *of_ratios)]


def worst_of_parts(parts: int, *of_ratios: torch.Tensor) -> list[list[float]]:
    """Return the largest ratio in each of ``parts`` equal parts of every tensor's first axis."""
    largest = [
        ratio.reshape(parts, -1).amax(1) if ratio.numel() else ratio.new_zeros(parts)
        for ratio in of_ratios
    ]
    found: list[list[float]] = torch.stack(largest).tolist()
    return found
