"""Whether the slope of a softcap has digits where tanh is nearly 1."""

from __future__ import annotations

import dataclasses
import math

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer
from fa_verify.probing.experiments import Experiment, Observation, decided, experiment, observe
from fa_verify.probing.rounding import tensors
from fa_verify.probing.trying import attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["slope_of_softcap"]

_WORD = "softcap_slope"
_SOFTCAP = 0.5
# Every score in units of the softcap. tanh is 1 in float32, and the slope 1.5e-10.
_RATIO = 12.0


@experiment(_WORD)
def _slope(subject: Subject, which: Experiment) -> Observation:
    """A column of dq that is the slope times known numbers.

    All scores are equal. dP of key 0 is N, that of other keys is 0, and key 0 alone has a number in
    column 1 of k.
    """
    problem = which.problem
    B, H, Hk, M, N, D, Dv = (getattr(problem, x) for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
    q, k, v, dout = (
        torch.zeros(shape, dtype=torch.float64)
        for shape in ((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M, Dv))
    )
    q[..., 0], k[..., 0] = 1, _RATIO * _SOFTCAP / problem.scale
    k[:, :, 0, 1], v[:, :, 0, 0], dout[..., 0] = 1, N, 1
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dq is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.dq[0, 0, -1:, 1].double().cpu() / (problem.scale * (1 - 1 / N))
    exact = math.cosh(_RATIO) ** -2
    expected = {
        "exact": exact, "1 - tanh**2": 0.0, "1 - tanh**2, off by one bit of tanh": 2.0**-23
    }  # fmt: skip
    # Roundings of x / c count 2 x / c times in the slope.
    tolerance = {name: max(2.0**-12 * value, 2.0**-12 * exact) for name, value in expected.items()}
    return Observation(
        got,
        {name: torch.full_like(got, value) for name, value in expected.items()},
        {name: torch.full_like(got, value) for name, value in tolerance.items()},
    )


def slope_of_softcap(subject: Subject, base: Problem) -> Answer:
    """Return whether the slope of a softcap is exact, or a difference that cancels.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes with a softcap, with gradients.
    """
    which = Experiment(_WORD, dataclasses.replace(base, dtype="fp32", softcap=_SOFTCAP))
    seen = observe(subject, which)
    values = {x: x if x == "exact" else "difference" for x in seen.expected}
    return decided(_WORD, which, seen, values)
