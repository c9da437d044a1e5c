"""Families of q, k, v that differ in the sizes of elements: outliers, underflow and overflow.

Gaussian inputs do not detect half of the faults on record. Each docstring names the faults that the
family detects.
"""

from __future__ import annotations

import math

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.sampling import (
    FLOOR,
    TORCH_DTYPES,
    Values,
    drawn_normal,
    drawn_shape,
    drawn_uniform,
    filled,
    of_entries,
    places,
    random_bits,
    to_entries,
)

__all__ = ["VALUE_FAMILIES"]

_OUTLIER_RATE = 0.001
_MASSIVE = 1000.0
_LARGE_MEAN = 50.0


def _normal_qk(problem: Problem, v: torch.Tensor) -> Values:
    """N(0, 1) for q and k, with a given v."""
    return Values(drawn_normal(problem, "q"), drawn_normal(problem, "k"), v)


def normal(problem: Problem) -> Values:
    """N(0, 1): detects wrong indices, masks and scales, on ordinary data."""
    return _normal_qk(problem, drawn_normal(problem, "v"))


def outliers(problem: Problem) -> Values:
    """N(0, 1) + N(0, 100) Bernoulli(0.001): detects precision lost in sums with a dominant term.

    At least one element of every tensor is an outlier of 30.

    Source: FlashAttention-3 (arXiv:2407.08608), section 4.3.
    """

    def drawn(tensor: str) -> torch.Tensor:
        values = drawn_normal(problem, tensor)
        name = f"outliers/{tensor}"
        seeds, shape = problem.all_seeds, values.shape
        extra = stream.normal(seeds, f"{name}/extra", shape, problem.device) * 10.0
        rate = drawn_uniform(problem, f"{name}/rate", shape)
        values = torch.where(rate < _OUTLIER_RATE, values + extra, values)
        elements = values.numel() // len(seeds)
        place = random_bits(problem, f"{name}/place", (len(seeds), 1)) % max(1, elements)
        is_there = places(problem, elements) == place
        return torch.where(is_there.view(shape), 30.0, values)

    return Values(drawn("q"), drawn("k"), drawn("v"))


def massive_channel(problem: Problem) -> Values:
    """One channel of k is 1000 times larger and of q 1000 times smaller: dq differs by channel.

    The scores stay moderate. A scale shared by a row or a tensor, or a tolerance relative to its
    maximum, loses all other channels.
    """
    q, k, v = normal(problem)
    channel = of_entries(problem, [seed % problem.D for seed in problem.all_seeds])
    is_channel = places(problem, problem.D) == channel
    q = torch.where(is_channel, q * (1 / _MASSIVE), q)
    k = torch.where(is_channel, k * _MASSIVE, k)
    return Values(q, k, v)


def large_mean_v(problem: Problem) -> Values:
    """v = 50 + N(0, 1): dP - delta cancels nearly all digits. Also detects a wrong softmax sum."""
    return _normal_qk(problem, drawn_normal(problem, "v") + _LARGE_MEAN)


def positive_v(problem: Problem) -> Values:
    """v = |N(0, 1)|: nothing cancels, so errors of a truncating accumulator add up."""
    return _normal_qk(problem, drawn_normal(problem, "v").abs())


def near_max(problem: Problem) -> Values:
    """v near the largest finite number: detects overflow before the division.

    In fp16, |v| lies between an eighth and a quarter of the largest number, as the accumulator has
    a wider range. In other dtypes the sums of |dout||v|, unnormalised P|v| and dS'|q| must stay in
    range too, so v is divided by the length of the longest of these sums.
    """
    limit = torch.finfo(TORCH_DTYPES[problem.dtype]).max / 4
    if problem.dtype != "fp16":
        limit /= 4 * max(problem.N, problem.Dv, problem.G * problem.M)
    if problem.dtype == "fp64":
        limit *= 2.0**-25  # the float64 oracle sums products of several tensors
    shape = drawn_shape(problem, "v")
    bits = random_bits(problem, "near_max/v", shape)
    signs = (1 - 2 * (bits & 1)).to(torch.float64)
    fraction = (bits >> 11).to(torch.float64) * 2.0**-52
    calm = min(1.0, 1 / math.sqrt(problem.scale * math.sqrt(problem.D)))
    return Values(
        drawn_normal(problem, "q", calm),
        drawn_normal(problem, "k", calm),
        (fraction + 1) * (signs * (limit / 2)),
    )


def constant(problem: Problem) -> Values:
    """One value per tensor: out equals v. Detects a wrong softmax sum or count of visible keys."""

    def one(tensor: str) -> torch.Tensor:
        seeds = problem.all_seeds
        values = stream.normal(seeds, f"constant/{tensor}", (len(seeds),), problem.device)
        return to_entries(problem, values).expand(drawn_shape(problem, tensor))

    return Values(one("q"), one("k"), one("v"))


def _one_hot(problem: Problem) -> torch.Tensor:
    """Return v with a single 1 in each row n, at column n modulo Dv."""
    column = places(problem, problem.N) % problem.Dv
    ones = column.view(-1, 1) == places(problem, problem.Dv)
    return ones.to(torch.float64).expand(drawn_shape(problem, "v"))


def one_hot_v(problem: Problem) -> Values:
    """v[n] = 1 at column n % Dv: out consists of sums of weights and shows the mask."""
    return _normal_qk(problem, _one_hot(problem))


def zero_k(problem: Problem) -> Values:
    """k = 0, so p = 1/n exactly: exp(lse) counts the visible keys of each row."""
    zeros = filled(problem, "k", 0.0)
    return Values(drawn_normal(problem, "q"), zeros, drawn_normal(problem, "v"))


def zero_k_one_hot_v(problem: Problem) -> Values:
    """k = 0, v[n] = 1 at column n % Dv: out[d] n counts the visible keys of each residue class."""
    return Values(drawn_normal(problem, "q"), filled(problem, "k", 0.0), _one_hot(problem))


def zero_k_unit_v(problem: Problem) -> Values:
    """k = 0, v = 1: out is exactly 1 in fp16 and bf16. Detects a key lost or counted twice."""
    ones = filled(problem, "v", 1.0)
    return Values(drawn_normal(problem, "q"), filled(problem, "k", 0.0), ones)


def tiny(problem: Problem) -> Values:
    """v around the smallest normal number (fp16: 1e-4 to 1e-6): P' dout and dS underflow."""
    v = drawn_normal(problem, "v", 2.0 * FLOOR[problem.dtype])
    powers = torch.tensor([2.0**-e for e in range(8)], dtype=torch.float64, device=problem.device)
    exponents = random_bits(problem, "tiny/exponents", tuple(v.shape)) & 7
    return _normal_qk(problem, v * powers[exponents])


def subnormal(problem: Problem) -> Values:
    """Subnormal v: detects inputs or outputs flushed to zero, and double rounding on underflow."""
    return _normal_qk(problem, drawn_normal(problem, "v", FLOOR[problem.dtype] * 2.0**-4))


def tiny_k(problem: Problem) -> Values:
    """Subnormal k: dq = t dS K is in the underflow range of its dtype."""
    k = drawn_normal(problem, "k", FLOOR[problem.dtype] * 2.0**-4)
    return Values(drawn_normal(problem, "q"), k, drawn_normal(problem, "v"))


def tiny_q(problem: Problem) -> Values:
    """Subnormal q: dk = t dS' Q is in the underflow range of its dtype."""
    q = drawn_normal(problem, "q", FLOOR[problem.dtype] * 2.0**-4)
    return Values(q, drawn_normal(problem, "k"), drawn_normal(problem, "v"))


VALUE_FAMILIES = (
    normal,
    outliers,
    massive_channel,
    large_mean_v,
    positive_v,
    near_max,
    constant,
    one_hot_v,
    zero_k,
    zero_k_one_hot_v,
    zero_k_unit_v,
    tiny,
    subnormal,
    tiny_k,
    tiny_q,
)
