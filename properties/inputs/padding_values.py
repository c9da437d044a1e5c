"""Families of padding values: the values in padding, of all tensors or of one tensor only.

The families for one tensor exist because a kernel masks the load of each tensor separately. NaN
from one tensor can hide a missing mask of another: NaN from q covers NaN from k. Each docstring
names the faults that the family detects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import TENSORS, Problem
from fa_verify.properties.inputs.sampling import TORCH_DTYPES, drawn_shape, filled

__all__ = ["PADDING_VALUES", "PaddingValues"]

# Function from (problem, tensor) to the padding values: a number, or values of the drawn shape.
PaddingValues = Callable[[Problem, str], torch.Tensor | float]


def _alternating(problem: Problem, tensor: str, value: float) -> torch.Tensor:
    """Return value, -value, value, ... over the elements."""
    values = filled(problem, tensor, value)
    values.view(len(problem.all_seeds), -1)[:, 1::2] = -value
    return values


def _zero(problem: Problem, tensor: str) -> float:
    """0: the clean run with which the others are compared."""
    return 0.0


def _nan(problem: Problem, tensor: str) -> float:
    """NaN: detects padding that is multiplied by 0 instead of skipped."""
    return math.nan


def _inf(problem: Problem, tensor: str) -> torch.Tensor:
    """Infinities of alternating sign: as NaN, and detects maxima taken before masking."""
    return _alternating(problem, tensor, math.inf)


def _largest(problem: Problem, tensor: str) -> torch.Tensor:
    """The largest finite numbers, alternating: detects overflow that a NaN check misses."""
    return _alternating(problem, tensor, torch.finfo(TORCH_DTYPES[problem.dtype]).max)


def _noise(problem: Problem, tensor: str) -> torch.Tensor:
    """N(0, 1): detects padding that is read as if it were valid, without NaN in outputs."""
    shape = drawn_shape(problem, tensor)
    return stream.normal(problem.all_seeds, f"dirty/{tensor}", shape, problem.device)


_KINDS: dict[str, PaddingValues] = {"nan": _nan, "inf": _inf, "max": _largest, "noise": _noise}


def _alone(kind: PaddingValues, dirtied: str) -> PaddingValues:
    """Return ``kind`` for the padding of one tensor and 0 for the other tensors."""
    return lambda problem, tensor: kind(problem, tensor) if tensor == dirtied else 0.0


def _in_one_tensor() -> Iterator[tuple[str, PaddingValues]]:
    """Yield every kind for every single tensor: "nan_q", "nan_k", ... "noise_dout"."""
    for name, kind in _KINDS.items():
        for tensor in TENSORS:
            yield f"{name}_{tensor}", _alone(kind, tensor)


PADDING_VALUES: dict[str, PaddingValues] = {"zero": _zero, **_KINDS, **dict(_in_one_tensor())}
