"""Families of padding values: what stands in padding, in all tensors at once or in one alone.

In one alone, because the kernel reads each tensor with a mask of its own, and NaN in another one
can hide that a mask is missing: NaN from q covers NaN from k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import TENSORS, Problem
from fa_verify.properties.inputs.sampling import TORCH_DTYPES, drawn_shape, filled

__all__ = ["PADDING_VALUES", "PaddingValues"]

# (problem, tensor) -> what stands in its padding: one number, or values of the drawn shape.
PaddingValues = Callable[[Problem, str], torch.Tensor | float]


def _alternating(problem: Problem, tensor: str, value: float) -> torch.Tensor:
    """value, -value, value, ... over the elements."""
    values = filled(problem, tensor, value)
    values.view(len(problem.all_seeds), -1)[:, 1::2] = -value
    return values


def _zero(problem: Problem, tensor: str) -> float:
    """0: the clean run that the others are compared with."""
    return 0.0


def _nan(problem: Problem, tensor: str) -> float:
    """NaN: padding multiplied by 0 instead of left out."""
    return math.nan


def _inf(problem: Problem, tensor: str) -> torch.Tensor:
    """Infinities of alternating sign: the same, and maxima taken before the mask."""
    return _alternating(problem, tensor, math.inf)


def _largest(problem: Problem, tensor: str) -> torch.Tensor:
    """The largest finite numbers, alternating: overflow that a test for NaN inputs excuses."""
    return _alternating(problem, tensor, torch.finfo(TORCH_DTYPES[problem.dtype]).max)


def _noise(problem: Problem, tensor: str) -> torch.Tensor:
    """N(0, 1): padding read as if it were valid, unseen by a test for NaN outputs."""
    shape = drawn_shape(problem, tensor)
    return stream.normal(problem.all_seeds, f"dirty/{tensor}", shape, problem.device)


_KINDS: dict[str, PaddingValues] = {"nan": _nan, "inf": _inf, "max": _largest, "noise": _noise}


def _alone(kind: PaddingValues, dirtied: str) -> PaddingValues:
    """``kind`` in the padding of one tensor, 0 in that of the others."""
    return lambda problem, tensor: kind(problem, tensor) if tensor == dirtied else 0.0


def _in_one_tensor() -> Iterator[tuple[str, PaddingValues]]:
    """Every kind in every tensor alone: "nan_q", "nan_k", ... "noise_dout"."""
    for name, kind in _KINDS.items():
        for tensor in TENSORS:
            yield f"{name}_{tensor}", _alone(kind, tensor)


PADDING_VALUES: dict[str, PaddingValues] = {"zero": _zero, **_KINDS, **dict(_in_one_tensor())}
