"""The errors of one run in units of their bounds, in two numbers an output."""

from __future__ import annotations

import math

import torch

from oracles.outputs import OUTPUTS
from properties.compare import ratios
from properties.trial import Trial

__all__ = ["measured"]


def measured(trial: Trial) -> dict[str, tuple[float, float]]:
    """Output to (largest, root mean square) of error/bound over its elements.

    Whatever is exact counts as 0; an output that is None, or has no element, is left out.
    """
    names, found = [], []
    for name, got, want, bound in zip(
        OUTPUTS, trial.got, trial.want, trial.judgement.bound, strict=True
    ):
        if got is not None and got.numel():
            ratio = ratios(got, want, bound)
            names.append(name)
            found += [ratio.amax(), ratio.square().mean()]
    if not names:
        return {}
    # One answer from the GPU.
    numbers = torch.stack(found).tolist()
    return {name: (numbers[2 * i], math.sqrt(numbers[2 * i + 1])) for i, name in enumerate(names)}
