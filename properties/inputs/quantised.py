"""The tensors of a call with codes and scales.

Scales of neighbouring heads, entries, tokens and channels differ by powers of two. The periods of
q, k and v are coprime, so that a scale that is dropped, repeated or taken from another place shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.formats.element import FORMATS, ElementFormat
from fa_verify.oracles.formats.in_torch import encoded
from fa_verify.properties.inputs.padding_values import PADDING_VALUES
from fa_verify.properties.inputs.sampling import TORCH_DTYPES

__all__ = ["QuantisedInputs", "WholeScales", "make_quantised", "whole_scales"]

# The exponents of scales run from -(period // 2) to period // 2.
_PERIODS = {"q": 3, "k": 5, "v": 7}
# The place of the one scale of a tensor among these exponents, so that none of them is 1.
_OF_TENSOR = {"q": 2, "k": 1, "v": 5}
# Steps of the exponent from an entry, and from a head, to the next.
_OF_ENTRY, _OF_HEAD = 2, 1
_PEAKED = 3.0


class QuantisedInputs(NamedTuple):
    """The tensors of a call.

    Args:
        q: Codes (B, H, M, D).
        k: Codes (B, Hk, N, D).
        v: Codes (B, Hk, N, Dv), or numbers in the dtype of out.
        q_scale: Float32: (1,), (B, H), (B, H, M) or (B, H, blocks of M).
        k_scale: Float32: (1,), (B, Hk), (B, Hk, N) or (B, Hk, blocks of N).
        v_scale: Float32: (1,), (B, Hk) or (B, Hk, Dv); None for v in 16 bits.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None


class WholeScales(NamedTuple):
    """A scale for each token and head of q (B, H, M) and k (B, Hk, N), and column of v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _sizes(problem: QuantisedProblem, name: str) -> tuple[int, int, int, int]:
    """Returns B, heads, tokens and columns of a tensor."""
    a = problem.attention
    if name == "q":
        return a.B, a.H, a.M, a.D
    return a.B, a.Hk, a.N, a.D if name == "k" else a.Dv


def _format(problem: QuantisedProblem, name: str) -> ElementFormat | None:
    """Returns the format of a tensor; None for v in 16 bits."""
    return FORMATS.get(problem.v if name == "v" else problem.qk)


def _values(problem: QuantisedProblem, name: str, form: ElementFormat) -> torch.Tensor:
    """Returns the values of a tensor before its cast to codes, float64."""
    shape, seed, device = _sizes(problem, name), problem.seed, problem.device
    x = stream.normal(seed, f"codes of {name}", shape, device) * (form.largest / 4)
    choice = stream.integers(seed, f"chosen codes of {name}", shape, device)
    if problem.codes == "extreme":
        largest = torch.where(choice & 4 == 0, form.largest, -form.largest)
        x = torch.where(choice & 3 == 0, largest, x)
    elif problem.codes == "zeros":
        x = torch.where(choice & 1 == 0, 0.0, x)
    elif problem.codes == "subnormal":
        most = 2 ** max(form.mantissa, 3)
        x = form.spacing * ((choice & (2 * most - 1)) - most).to(torch.float64)
    return x


def _codes(problem: QuantisedProblem, name: str) -> torch.Tensor:
    """Returns the codes of a tensor, with the attention's ``dirty`` values in padding."""
    a, form = problem.attention, _format(problem, name)
    B, _, tokens, _ = shape = _sizes(problem, name)
    x = (
        stream.normal(problem.seed, f"codes of {name}", shape, problem.device)
        if form is None
        else _values(problem, name, form)
    )
    rows, keys = a.mask.lengths(a.B, a.M, a.N)
    lengths = torch.tensor(rows if name == "q" else keys, device=problem.device).view(B, 1, 1, 1)
    padded = torch.arange(tokens, device=problem.device).view(1, 1, -1, 1) >= lengths
    filling = torch.as_tensor(PADDING_VALUES[a.dirty](a, name), dtype=torch.float64)
    x = torch.where(padded, filling.to(problem.device), x)
    if form is None:
        return x.to(TORCH_DTYPES[problem.dtype])
    if form.nan_code is None:
        x = torch.nan_to_num(x, nan=-128.0)
    return encoded(x, form)


def _scale(problem: QuantisedProblem, name: str) -> torch.Tensor:
    """Returns the scale of a tensor, float32."""
    form, layout = _format(problem, name), problem.v_scales if name == "v" else problem.qk_scales
    assert form is not None
    B, heads, tokens, columns = _sizes(problem, name)
    block = problem.blocks[name == "k"]
    lasts = {"token": tokens, "block": -(-tokens // block), "channel": columns}
    shape = {"tensor": (1, 1, 1), "head": (B, heads, 1)}.get(layout) or (B, heads, lasts[layout])
    entry, head, last = (
        torch.arange(size, device=problem.device).view([-1 if i == axis else 1 for i in range(3)])
        for axis, size in enumerate(shape)
    )
    place = _OF_ENTRY * entry + _OF_HEAD * head + last
    if layout == "tensor":
        place = place + _OF_TENSOR[name]
    period = _PERIODS[name]
    exponent = (place % period - period // 2).to(torch.float64)
    if problem.codes == "heads" and name == "v":
        exponent = exponent * 2
    size = 4 / form.largest
    if problem.codes == "subnormal":
        size = 0.25 / form.spacing
    if problem.codes == "peaked" and name == "q":
        size *= _PEAKED
    # Eight mantissas near 1, so that scales are no powers of two and their ratios nearly are.
    choice = stream.integers(problem.seed, f"scale of {name}", shape, problem.device) & 7
    scale = size * torch.exp2(exponent) * (1 + choice.to(torch.float64) / 64)
    if layout in ("token", "block"):
        scale = _dirty(problem, name, scale, 1 if layout == "token" else block)
    elif layout == "head":
        scale = scale[..., 0]
    elif layout == "tensor":
        scale = scale.view(1)
    return scale.to(torch.float32)


def _dirty(problem: QuantisedProblem, name: str, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the scales of tokens with NaN for padding, where padding holds NaN."""
    a = problem.attention
    if a.dirty not in ("nan", f"nan_{name}"):
        return scale
    rows, keys = a.mask.lengths(a.B, a.M, a.N)
    lengths = torch.tensor(rows if name == "q" else keys, device=scale.device).view(-1, 1, 1)
    starts = torch.arange(scale.shape[2], device=scale.device) * block
    return torch.where(starts >= lengths, torch.nan, scale)


def make_quantised(problem: QuantisedProblem) -> QuantisedInputs:
    """Returns the tensors of a problem."""
    q, k, v = (_codes(problem, name) for name in "qkv")
    v_scale = None if problem.v == "input" else _scale(problem, "v")
    return QuantisedInputs(q, k, v, _scale(problem, "q"), _scale(problem, "k"), v_scale)


def whole_scales(problem: QuantisedProblem, x: QuantisedInputs) -> WholeScales:
    """Returns the scales of a call, float64, one for each token and for each column of v."""

    def of_tokens(scale: torch.Tensor, name: str) -> torch.Tensor:
        B, heads, tokens, _ = _sizes(problem, name)
        if problem.qk_scales == "tensor":
            return scale.view(1, 1, 1).expand(B, heads, tokens)
        if problem.qk_scales == "head":
            return scale.unsqueeze(2).expand(B, heads, tokens)
        if problem.qk_scales == "token":
            return scale
        return scale.repeat_interleave(problem.blocks[name == "k"], 2)[:, :, :tokens]

    B, heads, _, columns = _sizes(problem, "v")
    v_scale = x.q_scale.new_ones(1) if x.v_scale is None else x.v_scale
    if v_scale.ndim < 3:
        v_scale = v_scale.view(*v_scale.shape, *(1,) * (3 - v_scale.ndim))
    of_columns = v_scale.expand(B, heads, columns)
    q, k = of_tokens(x.q_scale, "q"), of_tokens(x.k_scale, "k")
    return WholeScales(q.double(), k.double(), of_columns.double())
