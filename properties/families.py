"""Families of values: what q, k, v, dout hold, and what stands in padding.

A family is a pure function of a problem. It returns float64 values made of stream integers with
``+ - *`` and comparisons alone, so that every device gives the same bits. (Not even ``/`` by a
number: on a GPU PyTorch multiplies by the reciprocal instead.) Factors are computed on the host.

Gaussian inputs never show half of the faults on record, so each family says which fault it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from oracles import stream
from oracles.problem import TENSORS, Problem

__all__ = [
    "DIRTY",
    "DOUT",
    "INPUTS",
    "TORCH_DTYPES",
    "Values",
    "drawn_shape",
    "last_visible",
    "length_tensors",
]

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Where underflow begins: the smallest normal number. For float64 it is 2**-1022, but the products
# of two such values would vanish from a float64 oracle as well, so values stay near 1e-300.
_FLOOR = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126, "fp64": 2.0**-997}
_OUTLIER_RATE = 0.001
_NEEDLE_SCORE = 20.0


class Values(NamedTuple):
    """Float64 values of q, k, v; where a layout is "expanded", of one head for all."""

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


def _normal(problem: Problem, tensor: str, factor: float = 1.0) -> torch.Tensor:
    """N(0, factor**2) in the tensor's drawn shape."""
    family = problem.dout if tensor == "dout" else problem.inputs
    shape = drawn_shape(problem, tensor)
    return stream.normal(problem.seed, f"{family}/{tensor}", shape, problem.device) * factor


def _full(problem: Problem, tensor: str, value: float) -> torch.Tensor:
    """One value everywhere, in the tensor's drawn shape."""
    shape = drawn_shape(problem, tensor)
    return torch.full(shape, value, dtype=torch.float64, device=problem.device)


def _bits(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """63 random bits: non-negative int64."""
    return stream.integers(problem.seed, name, shape, problem.device) & (2**63 - 1)


def _signs(problem: Problem, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """+1 or -1, evenly."""
    return ((_bits(problem, name, shape) & 1) * 2 - 1).to(torch.float64)


def normal(problem: Problem) -> Values:
    """N(0, 1): wrong indices, masks and scales, on data where nothing else is odd."""
    return Values(_normal(problem, "q"), _normal(problem, "k"), _normal(problem, "v"))


def outliers(problem: Problem) -> Values:
    """N(0, 1) + N(0, 100) Bernoulli(0.001): precision lost where single entries dominate a sum.

    At least one entry of every tensor is an outlier of 30.

    Source: FlashAttention-3 (arXiv:2407.08608), section 4.3.
    """

    def drawn(tensor: str) -> torch.Tensor:
        values = _normal(problem, tensor)
        name = f"outliers/{tensor}"
        extra = stream.normal(problem.seed, f"{name}/extra", values.shape, problem.device) * 10.0
        rate = stream.uniform(problem.seed, f"{name}/rate", values.shape, problem.device)
        values = torch.where(rate < _OUTLIER_RATE, values + extra, values)
        place = _bits(problem, f"{name}/place", (1,)) % max(1, values.numel())
        index = torch.arange(values.numel(), device=problem.device).view(values.shape)
        return torch.where(index == place, 30.0, values)

    return Values(drawn("q"), drawn("k"), drawn("v"))


def times8(problem: Problem) -> Values:
    """Scores multiplied by 8: a missing rescale of the accumulator when the row maximum moves."""
    return Values(_normal(problem, "q", 8.0), _normal(problem, "k"), _normal(problem, "v"))


def times40(problem: Problem) -> Values:
    """Scores multiplied by 40, one key takes all: exp overflow, saturated rows, lost gradients."""
    return Values(_normal(problem, "q", 40.0), _normal(problem, "k"), _normal(problem, "v"))


def _shifted(problem: Problem, shift: float) -> Values:
    """Scores of about ``shift``: channel 0 of q and k is constant, the rest adds N(0, 1) at most.

    The factor is split evenly, so |q|, |k| = sqrt(|shift| / sm_scale); in fp16 the cast saturates
    them once sm_scale < 2e-5.
    """
    q0 = math.sqrt(abs(shift) / problem.scale)
    rest = min(1.0, 1.0 / math.sqrt(problem.scale * math.sqrt(problem.D)))
    q, k = _normal(problem, "q", rest), _normal(problem, "k", rest)
    q[..., 0] = q0
    k[..., 0] = math.copysign(q0, shift)
    return Values(q, k, _normal(problem, "v"))


def lse_low_90(problem: Problem) -> Values:
    """LSE near -90: exp(score) without the maximum subtracted is subnormal, or flushed to 0."""
    return _shifted(problem, -90.0)


def lse_low_130(problem: Problem) -> Values:
    """LSE near -130: exp(score) without the maximum subtracted is 0 even as a subnormal."""
    return _shifted(problem, -130.0)


def lse_low_6e3(problem: Problem) -> Values:
    """LSE near -6e3: a finite stand-in for -inf, or a running maximum that starts too high."""
    return _shifted(problem, -6e3)


def lse_high_6e4(problem: Problem) -> Values:
    """LSE near +6e4: an LSE kept in 16 bits, or exp(score - m) with m of another unit."""
    return _shifted(problem, 6e4)


def last_visible(problem: Problem) -> torch.Tensor:
    """The last visible key of every row, int64 (B, M); -1 in a row without one."""
    mask = problem.mask
    rows, keys = (x.view(-1, 1) for x in length_tensors(problem))
    m = torch.arange(problem.M, device=problem.device)
    position = m + keys - rows
    last = keys - 1 + 0 * m
    if mask.right is not None:
        last = torch.minimum(last, position + mask.right)
    seen = (m < rows) & (last >= 0)
    if mask.window_left is not None:
        seen = seen & (last >= position - mask.window_left)
    return torch.where(seen, last, -1)


def _needles(problem: Problem, hidden: bool) -> Values:
    """Every few rows, q = a d and the key that the row aims at k = c d, with d = +-1 per channel.

    d belongs to the key, so rows that aim at one key agree; |d|^2 = D exactly, so no sum is needed
    to make the score 20. a keeps the row's other scores within N(0, 1).
    """
    q, k, v = _normal(problem, "q"), _normal(problem, "k"), _normal(problem, "v")
    if 0 in (problem.B, problem.M, problem.N):
        return Values(q, k, v)
    rows, keys = (x.view(-1, 1) for x in length_tensors(problem))
    target = last_visible(problem)
    if hidden:
        has_hidden = (target + 1 < keys) & (torch.arange(problem.M, device=problem.device) < rows)
        target = torch.where(has_hidden, target + 1, target)
    stride = (rows // 4).clamp(min=1)
    m = torch.arange(problem.M, device=problem.device)
    target = torch.where(m % stride == problem.seed % stride, target, -1)

    heads = 1 if q.shape[1] < problem.H else k.shape[1]
    shape = (problem.B, heads, problem.N, problem.D)
    direction = _signs(problem, f"{problem.inputs}/direction", shape)
    a = min(1.0, 1.0 / (problem.scale * math.sqrt(problem.D)))
    c = _NEEDLE_SCORE / min(problem.scale * problem.D, math.sqrt(problem.D))

    aims = (target >= 0).view(problem.B, 1, problem.M, 1)
    index = target.clamp(min=0).view(problem.B, 1, problem.M, 1)
    aimed = direction.take_along_dim(index, dim=2)
    if heads > 1:
        aimed = aimed.repeat_interleave(problem.G, dim=1)
    q = torch.where(aims, aimed * a, q)
    # One slot more than keys takes the rows that aim at nothing.
    hit = torch.zeros(problem.B, problem.N + 1, dtype=torch.bool, device=problem.device)
    hit.scatter_(1, torch.where(target >= 0, target, problem.N), True)
    k = torch.where(hit[:, None, : problem.N, None], direction * c, k)
    return Values(q, k, v)


def needle_visible(problem: Problem) -> Values:
    """The last visible key of some rows has nearly all their weight: a mask one key too narrow."""
    return _needles(problem, hidden=False)


def needle_hidden(problem: Problem) -> Values:
    """The first key hidden on the right would take nearly all the weight: a mask too wide.

    Rows that hide no valid key on the right have the needle at their last visible key.
    """
    return _needles(problem, hidden=True)


def constant(problem: Problem) -> Values:
    """One value per tensor: out must be v, so a wrong softmax sum or visible count stands out."""

    def filled(tensor: str) -> torch.Tensor:
        value = stream.normal(problem.seed, f"constant/{tensor}", (1, 1, 1, 1), problem.device)
        return value.repeat(drawn_shape(problem, tensor))

    return Values(filled("q"), filled("k"), filled("v"))


def zero_k(problem: Problem) -> Values:
    """k = 0, so p = 1/n exactly: exp(lse) counts the visible keys of each row."""
    return Values(_normal(problem, "q"), _full(problem, "k", 0.0), _normal(problem, "v"))


def tiny(problem: Problem) -> Values:
    """v around the smallest normal number (fp16: 1e-4 to 1e-6): P' dout and dS underflow."""
    v = _normal(problem, "v", 2.0 * _FLOOR[problem.dtype])
    powers = torch.tensor([2.0**-e for e in range(8)], dtype=torch.float64, device=problem.device)
    exponents = _bits(problem, "tiny/exponents", tuple(v.shape)) & 7
    return Values(_normal(problem, "q"), _normal(problem, "k"), v * powers[exponents])


def subnormal(problem: Problem) -> Values:
    """v of subnormal numbers: inputs or outputs flushed to zero, underflow rounded twice."""
    v = _normal(problem, "v", _FLOOR[problem.dtype] * 2.0**-4)
    return Values(_normal(problem, "q"), _normal(problem, "k"), v)


def tiny_k(problem: Problem) -> Values:
    """Subnormal k: dq = t dS K lands in the underflow range of its dtype."""
    k = _normal(problem, "k", _FLOOR[problem.dtype] * 2.0**-4)
    return Values(_normal(problem, "q"), k, _normal(problem, "v"))


def tiny_q(problem: Problem) -> Values:
    """Subnormal q: dk = t dS' Q lands in the underflow range of its dtype."""
    q = _normal(problem, "q", _FLOOR[problem.dtype] * 2.0**-4)
    return Values(q, _normal(problem, "k"), _normal(problem, "v"))


def dout_normal(problem: Problem) -> torch.Tensor:
    """N(0, 1): any fault of the backward."""
    return _normal(problem, "dout")


def dout_zero(problem: Problem) -> torch.Tensor:
    """All 0: gradients that do not come from dout, such as memory that was never written."""
    return _full(problem, "dout", 0.0)


def dout_constant(problem: Problem) -> torch.Tensor:
    """All 1, as ``out.sum().backward()`` makes it: delta wrong where dP hardly varies."""
    return _full(problem, "dout", 1.0)


def dout_tiny(problem: Problem) -> torch.Tensor:
    """N(0, 1) times 2**-17, about 1e-5: dS and P' dout in the underflow range of fp16."""
    return _normal(problem, "dout", 2.0**-17)


def dout_subnormal(problem: Problem) -> torch.Tensor:
    """Subnormal numbers: dv = P' dout lands in the underflow range of its dtype."""
    return _normal(problem, "dout", _FLOOR[problem.dtype] * 2.0**-4)


def dout_one_hot(problem: Problem) -> torch.Tensor:
    """One 1 in a valid row of each batch entry and head: dv is a row of P, which reads the mask."""
    B, heads, M, Dv = drawn_shape(problem, "dout")
    rows, _ = length_tensors(problem)
    row = _bits(problem, "one_hot/row", (B, heads)) % rows.clamp(min=1).view(B, 1)
    column = _bits(problem, "one_hot/column", (B, heads)) % Dv
    is_row = torch.arange(M, device=problem.device).view(M, 1) == row.view(B, heads, 1, 1)
    is_column = torch.arange(Dv, device=problem.device) == column.view(B, heads, 1, 1)
    return (is_row & is_column).to(torch.float64)


def _dirty_signs(problem: Problem, tensor: str) -> torch.Tensor:
    """+1, -1, +1, ... over the elements."""
    shape = drawn_shape(problem, tensor)
    index = torch.arange(math.prod(shape), device=problem.device)
    return (1 - 2 * (index & 1)).to(torch.float64).view(shape)


def dirty_zero(problem: Problem, tensor: str) -> torch.Tensor:
    """0: the clean run that the others are compared with."""
    return _full(problem, tensor, 0.0)


def dirty_nan(problem: Problem, tensor: str) -> torch.Tensor:
    """NaN: padding multiplied by 0 instead of left out."""
    return _full(problem, tensor, math.nan)


def dirty_inf(problem: Problem, tensor: str) -> torch.Tensor:
    """Infinities of alternating sign: the same, and maxima taken before the mask."""
    return _dirty_signs(problem, tensor) * math.inf


def dirty_max(problem: Problem, tensor: str) -> torch.Tensor:
    """The largest finite numbers, alternating: overflow that a test for NaN inputs excuses."""
    return _dirty_signs(problem, tensor) * torch.finfo(TORCH_DTYPES[problem.dtype]).max


def dirty_noise(problem: Problem, tensor: str) -> torch.Tensor:
    """N(0, 1): padding read as if it were valid, unseen by a test for NaN outputs."""
    shape = drawn_shape(problem, tensor)
    return stream.normal(problem.seed, f"dirty/{tensor}", shape, problem.device)


INPUTS: dict[str, Callable[[Problem], Values]] = {
    family.__name__: family
    for family in (
        normal,
        outliers,
        times8,
        times40,
        lse_low_90,
        lse_low_130,
        lse_low_6e3,
        lse_high_6e4,
        needle_visible,
        needle_hidden,
        constant,
        zero_k,
        tiny,
        subnormal,
        tiny_k,
        tiny_q,
    )
}
DOUT: dict[str, Callable[[Problem], torch.Tensor]] = {
    "normal": dout_normal,
    "zero": dout_zero,
    "constant": dout_constant,
    "tiny": dout_tiny,
    "subnormal": dout_subnormal,
    "one_hot": dout_one_hot,
}
DIRTY: dict[str, Callable[[Problem, str], torch.Tensor]] = {
    "zero": dirty_zero,
    "nan": dirty_nan,
    "inf": dirty_inf,
    "max": dirty_max,
    "noise": dirty_noise,
}
