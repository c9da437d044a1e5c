"""Helpers with which the families of values draw from the stream.

A family is a pure function of a problem. It computes float64 values from stream integers with
``+ - *`` and comparisons only, so that every device gives the same bits. Division by a number is
excluded, because PyTorch multiplies by the reciprocal on a GPU. Factors are computed on the host.
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

# The smallest normal number, where underflow begins. For float64 it is 2**-1022, but products of
# two such values would underflow in the float64 oracle too, so values stay near 1e-300.
FLOOR = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126, "fp64": 2.0**-997}


class Values(NamedTuple):
    """Float64 values of q, k, v, in a shape that expands to the tensor's drawn shape."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def drawn_shape(problem: Problem, tensor: str) -> tuple[int, int, int, int]:
    """Return the shape in which a tensor's values are drawn, (B, heads, M or N, D or Dv).

    One head is drawn for an "expanded" tensor, which has the same values in every head.
    """
    heads = problem.H if tensor in ("q", "dout") else problem.Hk
    if problem.layouts[TENSORS.index(tensor)] == "expanded":
        heads = 1
    seqlen = problem.M if tensor in ("q", "dout") else problem.N
    return problem.B, heads, seqlen, problem.D if tensor in ("q", "k") else problem.Dv


def length_tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (seqlens_q, seqlens_k), int64 of shape (B,), on the problem's device."""
    lengths = problem.mask.lengths(problem.B, problem.M, problem.N)
    rows, keys = (torch.tensor(x, dtype=torch.int64, device=problem.device) for x in lengths)
    return rows, keys


def drawn_normal(problem: Problem, tensor: str, factor: float = 1.0) -> torch.Tensor:
    """Return N(0, factor**2) in the tensor's drawn shape, keyed by the problem's family."""
    family = problem.dout if tensor == "dout" else problem.inputs
    shape = drawn_shape(problem, tensor)
    values = stream.normal(problem.all_seeds, f"{family}/{tensor}", shape, problem.device)
    return values if factor == 1 else values * factor


def filled(problem: Problem, tensor: str, value: float) -> torch.Tensor:
    """Return one value everywhere, in the tensor's drawn shape."""
    shape = drawn_shape(problem, tensor)
    return torch.full(shape, value, dtype=torch.float64, device=problem.device)


def random_bits(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return 63 random bits as non-negative int64."""
    return stream.integers(problem.all_seeds, name, shape, problem.device) & (2**63 - 1)


def drawn_uniform(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return uniform float64 in [0, 1)."""
    return stream.uniform(problem.all_seeds, name, shape, problem.device)


def of_entries(problem: Problem, numbers: Sequence[float]) -> torch.Tensor:
    """Return a number for each seed of a problem, as (B or 1, 1, 1, 1) on its device."""
    dtype = torch.int64 if all(isinstance(x, int) for x in numbers) else torch.float64
    return to_entries(problem, torch.tensor(numbers, dtype=dtype, device=problem.device))


def to_entries(problem: Problem, values: torch.Tensor) -> torch.Tensor:
    """Reshape values (seeds,), one for each seed of a problem, to (B or 1, 1, 1, 1)."""
    if len(values) > 1:
        values = values.repeat_interleave(problem.B // len(values))
    return values.view(-1, 1, 1, 1)


def places(problem: Problem, count: int) -> torch.Tensor:
    """Return 0, 1, ... count - 1 as int64."""
    return torch.arange(count, device=problem.device)
