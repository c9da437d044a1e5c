"""How the families of values draw from the stream: shapes, names, dtypes.

A family is a pure function of a problem. It returns float64 values made of stream integers with
``+ - *`` and comparisons alone, so that every device gives the same bits. (Not even ``/`` by a
number: on a GPU PyTorch multiplies by the reciprocal instead.) Factors are computed on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import TENSORS, Problem

__all__ = [
    "FLOOR",
    "TORCH_DTYPES",
    "Values",
    "drawn_normal",
    "drawn_shape",
    "drawn_uniform",
    "filled",
    "length_tensors",
    "of_entries",
    "places",
    "random_bits",
    "to_entries",
]

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Where underflow begins: the smallest normal number. For float64 it is 2**-1022, but the products
# of two such values would vanish from a float64 oracle as well, so values stay near 1e-300.
FLOOR = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126, "fp64": 2.0**-997}


class Values(NamedTuple):
    """Float64 values of q, k, v, in a shape that expands to the tensor's drawn shape."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def drawn_shape(problem: Problem, tensor: str) -> tuple[int, int, int, int]:
    """The shape in which a tensor's values are drawn: (B, heads, M or N, D or Dv).

    An "expanded" tensor has the same values in every head, so one head is drawn.
    """
    heads = problem.H if tensor in ("q", "dout") else problem.Hk
    if problem.layouts[TENSORS.index(tensor)] == "expanded":
        heads = 1
    seqlen = problem.M if tensor in ("q", "dout") else problem.N
    return problem.B, heads, seqlen, problem.D if tensor in ("q", "k") else problem.Dv


def length_tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(seqlens_q, seqlens_k), int64 (B,) each on the problem's device."""
    lengths = problem.mask.lengths(problem.B, problem.M, problem.N)
    rows, keys = (torch.tensor(x, dtype=torch.int64, device=problem.device) for x in lengths)
    return rows, keys


def drawn_normal(problem: Problem, tensor: str, factor: float = 1.0) -> torch.Tensor:
    """N(0, factor**2) in the tensor's drawn shape, of the family that the problem names."""
    family = problem.dout if tensor == "dout" else problem.inputs
    shape = drawn_shape(problem, tensor)
    values = stream.normal(problem.all_seeds, f"{family}/{tensor}", shape, problem.device)
    return values if factor == 1 else values * factor


def filled(problem: Problem, tensor: str, value: float) -> torch.Tensor:
    """One value everywhere, in the tensor's drawn shape."""
    shape = drawn_shape(problem, tensor)
    return torch.full(shape, value, dtype=torch.float64, device=problem.device)


def random_bits(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """63 random bits: non-negative int64."""
    return stream.integers(problem.all_seeds, name, shape, problem.device) & (2**63 - 1)


def drawn_uniform(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform float64 in [0, 1)."""
    return stream.uniform(problem.all_seeds, name, shape, problem.device)


def of_entries(problem: Problem, numbers: Sequence[float]) -> torch.Tensor:
    """A number for each seed of a problem, as (B or 1, 1, 1, 1) on its device."""
    dtype = torch.int64 if all(isinstance(x, int) for x in numbers) else torch.float64
    return to_entries(problem, torch.tensor(numbers, dtype=dtype, device=problem.device))


def to_entries(problem: Problem, values: torch.Tensor) -> torch.Tensor:
    """Values (seeds,), one for each seed of a problem, as (B or 1, 1, 1, 1)."""
    if len(values) > 1:
        values = values.repeat_interleave(problem.B // len(values))
    return values.view(-1, 1, 1, 1)


def places(problem: Problem, count: int) -> torch.Tensor:
    """0, 1, ... count - 1, int64."""
    return torch.arange(count, device=problem.device)
