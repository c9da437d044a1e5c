"""Attention in float64 with the casts that a kernel declares, and no other rounding.

The error of its outputs is that of the casts: additions, products and exponentials are exact to
float64. ``benchmarks.numerics`` holds kernels to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.probing.formats import rounded
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["exact_casts", "rounded_once"]

_Cast = Callable[[torch.Tensor], torch.Tensor]


def rounded_once(want: Outputs[torch.Tensor], dtype: str) -> Outputs[torch.Tensor]:
    """Returns float64 outputs, each rounded to its dtype; that of lse is float32."""
    return Outputs(
        *(rounded(x, "fp32" if name == "lse" else dtype) for name, x in want._asdict().items())
    )


def exact_casts(problem: Problem, inputs: Inputs, numerics: Numerics) -> Outputs[torch.Tensor]:
    """Returns the outputs in float64, with the declared casts and the last rounding.

    TF32 operands are rounded to nearest. Operands that are prescaled are multiplied by the scale
    alone. Sums over a group of heads are not modelled.

    Args:
        problem: A problem without score modifications and grouped heads.
        inputs: Its tensors.
        numerics: The declarations. Without a cast to the dtype, P and dS keep their digits.
    """
    dtype, s = problem.dtype, problem.scale
    operand = _cast(dtype, numerics)
    cast: _Cast = operand if numerics.p_dtype == "input" else _whole
    q, k, v, dout = (operand(x.double()) for x in inputs.tensors)
    seen = problem.mask.dense(problem.B, problem.H, problem.M, problem.N, device=q.device)
    scores = _scores(q, k, s, dtype, numerics.prescales).masked_fill(~seen, -torch.inf)
    m = scores.amax(3, keepdim=True)
    p = (scores - m).exp()
    total = (cast(p) if numerics.l_from == "rounded" else p).sum(3, keepdim=True)
    out = cast(p / total) @ v if numerics.p_normalised else cast(p) @ v / total
    lse = m + total.log()
    given = rounded(out, dtype) if "out" in numerics.backward_reads else out
    read = rounded(lse, "fp32") if "lse" in numerics.backward_reads else lse
    p = (scores - read).exp()
    delta = (inputs.dout.double() * given).sum(3, keepdim=True)
    ds = (cast(p) if numerics.ds_from == "rounded" else p) * (dout @ v.mT - delta)
    ds = cast(ds * s) if numerics.ds_scaled else cast(ds) * s
    exact = Outputs(out, lse.squeeze(3), ds @ k, ds.mT @ q, cast(p).mT @ dout)
    return rounded_once(exact, dtype)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x


def _cast(dtype: str, numerics: Numerics) -> _Cast:
    """The rounding of an operand of a dot."""
    name = "tf32" if dtype == "fp32" and numerics.dots == "tf32" else dtype
    return lambda x: rounded(x, name)


def _scores(q: torch.Tensor, k: torch.Tensor, s: float, dtype: str, prescales: str) -> torch.Tensor:
    """The scaled scores; operands that are prescaled are rounded after it."""
    if prescales == "qk":
        return rounded(q * s**0.5, dtype) @ rounded(k * s**0.5, dtype).mT
    if prescales == "q":
        return rounded(q * s, dtype) @ k.mT
    if prescales == "k":
        return q @ rounded(k * s, dtype).mT
    return q @ k.mT * s
