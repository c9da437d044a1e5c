"""Codes and scales of a cache: drawn so that no two scales that could be confused are alike."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.formats.in_torch import decoded, encoded
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.stream import uniform
from fa_verify.properties.inputs.tensors import Inputs, make

__all__ = ["Scales", "codes_of", "scales_of", "stored_inputs"]

# Exponents of scales, a prime number of them. A larger scale leaves fewer of the codes in use.
_EXPONENTS = {"e4m3fn": 7, "e5m2": 11, "int8": 5}
# Steps of the exponent along heads, entries, pages and tokens, and from keys to values. No two of
# them are alike, and none is a multiple of a number of exponents.
_OF_HEADS, _OF_ENTRIES, _OF_VALUES = 3, 2, 4


class Scales(NamedTuple):
    """The scales of keys and of values by entry, head and key, float32 (B, Hk, N)."""

    k: torch.Tensor
    v: torch.Tensor


@lru_cache(maxsize=64)
def _largest(attention: Problem) -> tuple[float, float]:
    """Return the largest finite magnitudes of keys and of values; 1 in place of 0."""
    inputs = make(attention)
    found = []
    for x in (inputs.k, inputs.v):
        size = x.to(torch.float64).abs()
        size = torch.where(size.isfinite(), size, 0.0)
        found.append(float(size.amax()) if size.numel() else 0.0)
    return found[0] or 1.0, found[1] or 1.0


def scales_of(problem: CacheProblem) -> Scales:
    """Return the scales of a call as they are in memory.

    A scale is a power of two times a number between 1 and 9/8 that has all digits. The exponents
    run through a prime number of values, in other steps along heads, entries, and tokens or pages.
    Those of values are others than those of keys in the same place. With the least exponent, the
    largest number of the inputs is at most the format's largest, and more than half of it.
    """
    a, form = problem.attention, problem.format
    assert form is not None
    primes = _EXPONENTS[form.name]
    key, head, entry = (
        torch.arange(size).view(shape)
        for size, shape in ((a.N, (1, 1, -1)), (a.Hk, (1, -1, 1)), (a.B, (-1, 1, 1)))
    )
    groups = {
        "tensor": torch.zeros(1, 1, 1, dtype=torch.int64),
        "head": _OF_HEADS * head,
        "page": _OF_HEADS * head + _OF_ENTRIES * entry + key // (problem.page_size or 1),
        "token_head": _OF_HEADS * head + _OF_ENTRIES * entry + key,
    }[problem.scales]
    of_pages = problem.scales == "page"
    places = -(-a.N // problem.page_size) if of_pages else a.N
    found = []
    for name, offset, largest in zip("kv", (0, _OF_VALUES), _largest(a), strict=True):
        shape = {
            "tensor": (1, 1, 1), "head": (1, a.Hk, 1), "page": (a.B, a.Hk, places),
            "token_head": (a.B, a.Hk, places),
        }[problem.scales]  # fmt: skip
        digits = uniform(a.seed, f"scales of {name}", shape)
        if of_pages:
            digits = digits.repeat_interleave(problem.page_size, 2)[:, :, : a.N]
        exponents = (groups + a.seed + offset) % primes
        base = math.ldexp(1.0, math.frexp(largest / form.largest)[1])
        scale = (base * 2.0**exponents * (1 + digits / 8)).to(torch.float32)
        if problem.divides:
            scale = scale.reciprocal()
        scale = scale.expand(a.B, a.Hk, a.N).clone()
        # Entries have the scales of the pages that they share.
        rows = problem.shared * problem.page_size
        scale[:, :, :rows] = scale[:1, :, :rows].clone()
        found.append(scale.to(a.device))
    return Scales(*found)


def codes_of(problem: CacheProblem, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers: to nearest, and saturating.

    Args:
        problem: The call.
        x: (B, Hk, N, columns). NaN becomes the format's, or the least integer.
        scale: (B, Hk, N), of ``scales_of``.
    """
    form = problem.format
    assert form is not None
    factor = scale.to(torch.float64).unsqueeze(3)
    number = x.to(torch.float64)
    number = number * factor if problem.divides else number / factor
    if form.nan_code is None:
        number = number.nan_to_num(nan=-torch.inf)
    return encoded(number, form)


def stored_inputs(problem: CacheProblem, inputs: Inputs) -> Inputs:
    """Return inputs whose cached keys and values are those of codes times scales, float64.

    Keys that the call appends, and places past the keys of an entry, are unchanged.
    """
    form, a = problem.format, problem.attention
    if form is None:
        return inputs
    cached = torch.arange(a.N) < torch.tensor(problem.before).view(-1, 1)
    cached = cached.to(a.device)[:, None, :, None]
    found = []
    for x, scale in zip((inputs.k, inputs.v), scales_of(problem), strict=True):
        number, factor = x.to(torch.float64), scale.to(torch.float64).unsqueeze(3)
        code = decoded(codes_of(problem, torch.where(cached, number, 0.0), scale), form)
        whole = code / factor if problem.divides else code * factor
        found.append(torch.where(cached, whole, number))
    return inputs._replace(k=found[0], v=found[1])
