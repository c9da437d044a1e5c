"""The errors of one run, in two numbers an output: the largest, and the root mean square."""

from __future__ import annotations

import math

import torch

from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.properties.checks.statistics import mean_squares
from fa_verify.properties.comparison.compare import ratios
from fa_verify.properties.execution.trial import Trial

__all__ = ["measured"]


def measured(trial: Trial) -> dict[str, tuple[float, float]]:
    """Output to (largest error/bound, root mean square of its errors).

    The root mean square is in units of the spread that independent roundings predict, where they
    do (``checks.statistics``): all elements weigh the same in it, so that it is the sharpest.
    Elsewhere it is in units of the bound. An output that is None, or has no element, is left out.
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
    squares = {name: numbers[2 * i + 1] for i, name in enumerate(names)} | mean_squares(trial)
    squares = {name: math.inf if math.isnan(x) else x for name, x in squares.items()}
    return {name: (numbers[2 * i], math.sqrt(squares[name])) for i, name in enumerate(names)}
