"""Summarise the errors of a run by the largest and the root mean square of each output."""

from __future__ import annotations

import math

import torch

from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.guarantees.statistics import mean_squares
from fa_verify.properties.running.trial import AttentionTrial

__all__ = ["measured"]


def measured(trial: AttentionTrial) -> dict[str, tuple[float, float]]:
    """Return (largest error/bound, root mean square of errors) for each output.

    The root mean square is in units of the spread predicted for independent roundings, if
    ``checks.statistics`` applies to the problem. All elements then have the same weight, which
    makes it the most sensitive. Otherwise it is in units of the bound. Outputs that are None or
    empty are omitted.
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
    # Synchronise with the GPU once.
    numbers = torch.stack(found).tolist()
    squares = {name: numbers[2 * i + 1] for i, name in enumerate(names)} | mean_squares(trial)
    squares = {name: math.inf if math.isnan(x) else x for name, x in squares.items()}
    return {name: (numbers[2 * i], math.sqrt(squares[name])) for i, name in enumerate(names)}
