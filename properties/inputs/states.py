"""The inputs of a merge: outs and lses of parts, and the gradients of the result."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.stream import normal, uniform
from fa_verify.properties.inputs.families import TORCH_DTYPES

__all__ = ["States", "empty_rows", "make_states", "stored_states"]

# The storage order of the axes of (P, B, H, M, Dv), innermost last.
_ORDERS = {
    "parts": (0, 1, 2, 3, 4),
    "heads inside": (0, 1, 3, 2, 4),
    "parts inside": (1, 2, 3, 0, 4),
    "columns": (0, 1, 2, 4, 3),
    "gaps": (0, 1, 2, 3, 4),
}
_SPREADS = {"normal": 1.0, "wide": 40.0, "equal": 0.0, "needle": 1.0, "rising": 1.0}
_LEVELS = {"high": 6e4, "low": -130.0, "lowest": -6e4}
_LARGEST = {"fp16": 3e4, "bf16": 1e30, "fp32": 1e30, "fp64": 1e290}
_TINY = {"fp16": 2.0**-22, "bf16": 2.0**-128, "fp32": 2.0**-130, "fp64": 2.0**-1026}


class States(NamedTuple):
    """The tensors of a merge.

    Args:
        outs: (P, B, H, M, Dv) in the dtype of the problem; NaN in rows that saw no key.
        lses: (P, B, H, M), float32 (float64 for fp64), natural; -inf in rows that saw no key.
        dout: (B, H, M, Dv), in the dtype of outs; NaN in rows in which no part saw a key, except
            in the layout "shared".
        dlse: (B, H, M), in the dtype of lses, as dout.
    """

    outs: torch.Tensor
    lses: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


def stored_states(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Copies parts (P,B,H,M,Dv) or (P,B,H,M) into storage of a layout, surrounded by NaN.

    ============  ========================================================
    parts         contiguous, one element past an aligned address
    heads inside  storage (P, B, M, H, Dv)
    parts inside  storage (B, H, M, P, Dv)
    columns       storage (P, B, H, Dv, M)
    gaps          every second element of a larger buffer
    shared        all parts are views of part 0, which they have to equal
    ============  ========================================================
    """
    if layout == "shared":
        return stored_states(x[:1], "parts").expand(x.shape) if len(x) else x.clone()
    order = [axis for axis in _ORDERS[layout] if axis < x.ndim]
    step = 2 if layout == "gaps" else 1
    moved = x.permute(order)
    buffer = x.new_full((1 + step * x.numel() + 1,), math.nan)
    inner = buffer[1 : 1 + step * x.numel() : step].view(moved.shape)
    inner.copy_(moved)
    return inner.permute([order.index(axis) for axis in range(x.ndim)])


def _lses(problem: MergeProblem, empty: torch.Tensor) -> torch.Tensor:
    """Returns natural lses in float64: the logarithm of a part's keys, and its scores.

    ========  ==================================================================================
    normal    scores of 0 to 2 in size
    wide      parts that differ by e^40: all but one are lost, or nearly
    equal     parts that differ in their keys alone
    needle    one part outweighs all others by e^60
    rising    each part outweighs the one before it by e^9
    high      an lse near 60,000, where float32 has two digits after the point
    low       an lse near -130, where e^lse is 0 in float32
    lowest    an lse near -60,000, below most numbers that stand for -inf
    ========  ==================================================================================
    """
    P = len(problem.parts)
    family, shape = problem.lse, problem.shape[:4]
    keys = torch.tensor(problem.parts, dtype=torch.float64).view(-1, 1, 1, 1).clamp(min=1)
    lses = _SPREADS.get(family, 8.0) * normal(problem.seed, "lses", shape)
    lses = lses + _LEVELS.get(family, 0.0) + keys.log()
    place = torch.arange(P).view(-1, 1, 1, 1)
    if family == "needle" and P:
        lses = lses + 60.0 * (place == problem.seed % P)
    if family == "rising":
        lses = lses + 9.0 * place
    return lses.masked_fill(empty, -math.inf)


def _outs(problem: MergeProblem) -> torch.Tensor:
    """Returns outs in float64.

    ========  ===========================================================================
    normal    N(0, 1)
    opposite  parts of alternating sign and equal size, which cancel
    largest   near the largest values of the dtype
    tiny      subnormal in the dtype
    ========  ===========================================================================
    """
    values = normal(problem.seed, "outs", problem.shape)
    if problem.out == "opposite":
        signs = 1.0 - 2.0 * (torch.arange(len(problem.parts)) % 2).to(torch.float64)
        # One row's size for all of its parts.
        values = signs.view(-1, 1, 1, 1, 1) * (
            3.0 + normal(problem.seed, "size", problem.shape[1:])
        )
    if problem.out == "largest":
        values = _LARGEST[problem.dtype] * (values / 12.0 + 0.5)
    if problem.out == "tiny":
        values = _TINY[problem.dtype] * values
    return values


def empty_rows(problem: MergeProblem) -> torch.Tensor:
    """Returns the rows of each part that saw no key, (P, B, H, M)."""
    shape = problem.shape[:4]
    none = torch.tensor([keys == 0 for keys in problem.parts], dtype=torch.bool).view(-1, 1, 1, 1)
    empty = none | (uniform(problem.seed, "hidden", shape) < problem.hidden / 16)
    # Views of one part share the rows that it saw.
    return empty[:1].expand(shape) if problem.layout == "shared" and len(empty) else empty


def make_states(problem: MergeProblem) -> States:
    """Returns the tensors of a problem, in its storage and on its device."""
    shape = problem.shape
    dtype = TORCH_DTYPES[problem.dtype]
    of_lse = torch.float64 if problem.dtype == "fp64" else torch.float32
    outs, empty = _outs(problem), empty_rows(problem)
    if problem.layout == "shared" and len(outs):
        outs = outs[:1].expand(shape)
    outs = outs.masked_fill(empty[..., None], math.nan).to(dtype)
    lses = _lses(problem, empty).to(of_lse)
    dout = normal(problem.seed, "dout", (1, *shape[1:])).to(dtype)
    dlse = normal(problem.seed, "dlse", (1, *shape[1:4])).to(of_lse)
    if problem.dout_layout == "shared":
        # As ``out.sum().backward()`` makes it.
        dout, dlse = dout.new_ones(()), dlse.new_ones(())
        dout, dlse = dout.expand(shape[1:]), dlse.expand(shape[1:4])
    else:
        nothing = empty.all(0)
        dout = dout.masked_fill(nothing[..., None], math.nan)
        dlse = dlse.masked_fill(nothing, math.nan)
        dout, dlse = (stored_states(x, problem.dout_layout)[0] for x in (dout, dlse))
    # The lses of views of one part differ all the same.
    of_lses = "parts" if problem.layout == "shared" else problem.layout
    kept = (stored_states(outs, problem.layout), stored_states(lses, of_lses), dout, dlse)
    if problem.device == "cpu":
        return States(*kept)
    return States(*(_moved(x, problem.device) for x in kept))


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a tensor on another device, with its strides."""
    storage = torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
