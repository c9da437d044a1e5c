"""The rounding of a kernel's additions, and its treatment of numbers below 2**-126."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.experiments import Experiment, Observation, decided, experiment, observe
from fa_verify.probing.rounding import tensors
from fa_verify.probing.trying import attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["arithmetic_of"]

# 2**-24 is half of the last bit of 1, and the last bit below 1, in float32.
_BIT = 2.0**-24
# Small numbers e in units of 2**-24. float32 holds 1 + 2.
_ADDED = (1.25, 2.0, 1.5)
# The sums 1 + e - 1 and -1 + e + 1 for each e, in the same units. Tensor cores align e to 1 and
# drop all below the last bit of 1, or one or two bits later. Then they truncate the sum to float32.
_SUMS = {
    "to nearest": (2.0, 1.0, 2.0, 2.0, 2.0, 2.0),
    "towards 0": (0.0, 2.0, 2.0, 2.0, 0.0, 2.0),
    "truncated when aligned": (0.0, 0.0, 2.0, 2.0, 0.0, 0.0),
    "truncated 1 bit later": (0.0, 1.0, 2.0, 2.0, 0.0, 1.0),
    "truncated 2 bits later": (0.0, 1.0, 2.0, 2.0, 0.0, 2.0),
    "wider than float32": (1.25, 1.25, 2.0, 2.0, 1.5, 1.5),
    "narrower than float32": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
}


@experiment("accumulation")
def _accumulation(subject: Subject, which: Experiment) -> Observation:
    """Sums of 1, a small number and -1, at the first, the middle and the last key.

    The weights are equal. Columns 0 and 1 of v have opposite signs of 1, and so has each further
    pair. So the small number is added to 1 in one of them and to -1 in the other, whichever key
    comes first.
    """
    problem = which.problem
    N, pairs = problem.N, min(len(_ADDED), problem.Dv // 2)
    unit = 2.0**10 if problem.dtype == "fp16" else 1.0
    v = torch.zeros(problem.B, 1, N, problem.Dv, dtype=torch.float64)
    v[..., 0, : 2 * pairs : 2], v[..., N - 1, : 2 * pairs : 2] = unit, -unit
    v[..., 0, 1 : 2 * pairs : 2], v[..., N - 1, 1 : 2 * pairs : 2] = -unit, unit
    for i in range(pairs):
        v[..., N // 2, 2 * i : 2 * i + 2] = _ADDED[i] * _BIT * unit
    tried = attempt(subject, problem, tensors(problem, v=v), backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[0, 0, -1, : 2 * pairs].double().cpu() * N / (_BIT * unit)
    expected = {}
    for name, sums in _SUMS.items():
        one = torch.tensor(sums[: 2 * pairs]).double()
        expected[name] = one
        expected[f"{name}, last key first"] = one.view(-1, 2).flip(1).flatten()
    tolerance = {name: torch.full_like(x, 2.0**-6) for name, x in expected.items()}
    return Observation(got, expected, tolerance)


@experiment("flush")
def _flush(subject: Subject, which: Experiment) -> Observation:
    """A sum of 2**-125 that is divided by the number of keys."""
    problem = which.problem
    v = torch.zeros(problem.B, 1, problem.N, problem.Dv, dtype=torch.float64)
    v[..., 0, :] = 2.0**-125
    tried = attempt(subject, problem, tensors(problem, v=v), backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[0, 0, -1, :1].double().cpu() * 2.0**125
    expected = {"kept": torch.ones_like(got) / problem.N, "flushed": torch.zeros_like(got)}
    return Observation(got, expected, {name: torch.full_like(got, 2.0**-16) for name in expected})


def arithmetic_of(subject: Subject, long: Problem, base: Problem) -> Iterator[Answer]:
    """Yield how additions of out round, and whether the division of out flushes.

    Args:
        subject: The kernel without its declarations.
        long: A problem with several tiles of keys.
        base: A problem that the kernel takes, in a dtype with the range of float32.
    """
    which = Experiment("accumulation", long)
    seen = observe(subject, which)
    yield decided("accumulation", which, seen, {x: x.partition(",")[0] for x in seen.expected})
    if base.dtype == "fp16":
        yield undecided("flushes", "fp16 holds no number below 2**-126")
        return
    which = Experiment("flush", base)
    found = decided("flushes", which, observe(subject, which), {"kept": False, "flushed": True})
    if found.value is False:
        # One operation that keeps small numbers proves nothing of the others.
        found = Answer("flushes", False, "tried", found.evidence, found.replay)
    yield found
