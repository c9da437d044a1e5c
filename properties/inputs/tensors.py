"""Create the tensors of a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch

from fa_verify.oracles.problem import TENSORS, Problem
from fa_verify.properties.inputs.bias_families import BIAS_DTYPES, BIAS_LAYOUTS, bias_values
from fa_verify.properties.inputs.families import (
    ALIBI,
    DLSE,
    DOUT,
    INPUTS,
    NO_ALIBI,
    NO_BIAS,
    NO_DLSE,
    NO_SINKS,
    PADDING_VALUES,
    SINKS,
    TORCH_DTYPES,
    drawn_shape,
)
from fa_verify.properties.inputs.layouts import lay_out
from fa_verify.properties.inputs.padding_values import PaddingValues

__all__ = ["Inputs", "make"]

Family = TypeVar("Family")


class Inputs(NamedTuple):
    """The tensors of a problem, in its dtype and on its device unless stated otherwise.

    Args:
        q: (B, H, M, D).
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        dout: Gradient of out, (B, H, M, Dv).
        dlse: Gradient of lse, (B, H, M), float32 (float64 for float64 problems); or None.
        alibi_slopes: (H,) or (B, H), float32; or None.
        bias: (B or 1, H or 1, M or 1, N or 1), in the dtype of q or float32; or None.
        sinks: (H,), float32; or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that are never None: q, k, v, dout, in the order of ``TENSORS``."""
        return self.q, self.k, self.v, self.dout


def _family(families: Mapping[str, Family], field: str, name: str) -> Family:
    if name not in families:
        raise ValueError(f"{field} is {name!r}; needs one of {tuple(families)}")
    return families[name]


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round values to a dtype, saturating finite values at its largest finite value.

    16-bit dtypes are rounded to float32 first. PyTorch does so anyway; the explicit cast makes it
    part of the definition of the values.
    """
    limit = torch.finfo(dtype).max
    values = values.clamp(-limit, limit)
    return values if dtype == torch.float64 else values.to(torch.float32).to(dtype)


def _padding(lengths: tuple[int, ...] | None, size: int, device: str) -> torch.Tensor | None:
    """Return a bool mask of padding, (B, 1, size, 1); None without padding, to save a launch."""
    if lengths is None or all(length == size for length in lengths):
        return None
    valid = torch.tensor(lengths, device=device).view(-1, 1, 1, 1)
    return torch.arange(size, device=device).view(-1, 1) >= valid


def make(
    problem: Problem,
    dirty: str | None = None,
    layouts: tuple[str, str, str, str] | None = None,
    around: float = math.nan,
) -> Inputs:
    """Create the tensors of a problem: a pure function with the same bits on every device.

    The families compute float64 values, which are rounded once and never to Inf. The family of
    padding values then overwrites padding: rows m >= seqlens_q[b] of q and dout, keys
    n >= seqlens_k[b] of k and v.

    Args:
        problem: The problem, which determines dtype, device and layouts.
        dirty: Family of padding values to use instead of the problem's. Valid elements do not
            change.
        layouts: Layouts of q, k, v, dout to use instead of the problem's. Values do not change,
            including the equal heads of a problem with an "expanded" layout.
        around: Value of the storage outside of the tensors' elements.

    Returns:
        The tensors.

    Raises:
        ValueError: The problem names an unknown family, or ``layouts`` has "expanded" for a tensor
            whose heads differ.
    """
    with torch.inference_mode():
        inputs = _family(INPUTS, "inputs", problem.inputs)(problem)
        dout = _family(DOUT, "dout", problem.dout)(problem)
    fill = _family(PADDING_VALUES, "dirty", problem.dirty if dirty is None else dirty)
    dtype = TORCH_DTYPES[problem.dtype]
    rows = _padding(problem.mask.seqlens_q, problem.M, problem.device)
    keys = _padding(problem.mask.seqlens_k, problem.N, problem.device)
    made = []
    for tensor, layout, values, padding in zip(
        TENSORS, layouts or problem.layouts, (*inputs, dout), (rows, keys, keys, rows), strict=True
    ):
        cast = _cast(values, dtype)
        if padding is not None:
            stands = fill(problem, tensor)
            if isinstance(stands, torch.Tensor):
                stands = stands.to(dtype)
            cast = torch.where(padding, stands, cast)
        B, _, seqlen, columns = drawn_shape(problem, tensor)
        heads = problem.H if tensor in ("q", "dout") else problem.Hk
        made.append(lay_out(cast.expand(B, heads, seqlen, columns), layout, around))
    dlse = None if problem.dlse == NO_DLSE else _dlse(problem, fill, rows, layouts, around)
    slopes = None if problem.alibi == NO_ALIBI else _slopes(problem, around)
    bias = None if problem.bias == NO_BIAS else _bias(problem, fill, layouts, around)
    sinks = None if problem.sinks == NO_SINKS else _sinks(problem, around)
    return Inputs(*made)._replace(dlse=dlse, alibi_slopes=slopes, bias=bias, sinks=sinks)


def _bias(
    problem: Problem, fill: PaddingValues, layouts: tuple[str, str, str, str] | None, around: float
) -> torch.Tensor:
    """Create the bias, with padding values in elements that no visible pair uses.

    These elements lie in padding, or the mask hides every pair that shares them. The seed chooses
    the layout; with ``layouts`` the bias is contiguous.
    """
    dtype = BIAS_DTYPES.get(problem.bias.partition("/")[0], TORCH_DTYPES[problem.dtype])
    values = _cast(bias_values(problem), dtype)
    stands = fill(problem, "dout")
    if isinstance(stands, torch.Tensor):
        stands = float(stands.flatten()[0]) if stands.numel() else 0.0
    if stands != 0:
        sizes = problem.B, problem.H, problem.M, problem.N
        seen = problem.mask.dense(*sizes, device=problem.device).expand(sizes)
        for axis, size in enumerate(values.shape):
            if size == 1:
                seen = seen.any(axis, keepdim=True)
        values = torch.where(seen, values, torch.tensor(stands, dtype=dtype, device=values.device))
    if layouts is not None:
        return lay_out(values, "bhsd", math.nan)
    around = around if math.isnan(around) else min(around, torch.finfo(dtype).max)
    return lay_out(values, BIAS_LAYOUTS[problem.all_seeds[0] % len(BIAS_LAYOUTS)], around)


def _slopes(problem: Problem, around: float) -> torch.Tensor:
    """Create the ALiBi slopes, as ``_every_second``."""
    values = _cast(_family(ALIBI, "alibi", problem.alibi)(problem), torch.float32)
    return _every_second(values, around)


def _sinks(problem: Problem, around: float) -> torch.Tensor:
    """Create the sinks, as ``_every_second``; -inf stays -inf."""
    return _every_second(_family(SINKS, "sinks", problem.sinks)(problem).float(), around)


def _every_second(values: torch.Tensor, around: float) -> torch.Tensor:
    """Lay out float32 values as every second element of a larger storage."""
    others = torch.full(values.shape, around, dtype=torch.float64, device=values.device)
    return torch.stack([values, _cast(others, torch.float32)], -1)[..., 0]


def _dlse(
    problem: Problem,
    fill: PaddingValues,
    padding: torch.Tensor | None,
    layouts: tuple[str, str, str, str] | None,
    around: float,
) -> torch.Tensor:
    """Create the gradient of lse, with the layout and the padding values of dout."""
    dtype = torch.float64 if problem.dtype == "fp64" else torch.float32
    cast = _cast(_family(DLSE, "dlse", problem.dlse)(problem), dtype).unsqueeze(3)
    if padding is not None:
        stands = fill(problem, "dout")
        if isinstance(stands, torch.Tensor):
            stands = stands[..., :1].to(dtype)
        cast = torch.where(padding, stands, cast)
    wide = cast.expand(problem.B, problem.H, problem.M, 1)
    return lay_out(wide, (layouts or problem.layouts)[3], around).squeeze(3)
