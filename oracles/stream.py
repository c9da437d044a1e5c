"""A counter-based integer stream, with equal values on every device and library version.

Each value is a hash of (seed, name, index), so it does not depend on earlier draws. The stream uses
integer and exactly rounded float64 operations alone: no library generator and no transcendental
function.

Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

__all__ = ["integers", "normal", "uniform"]

# One seed, or a seed for each of several equal parts of the first axis.
Seeds = int | Sequence[int]

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(value: int) -> int:
    """Returns the int64 with the bits of ``value`` modulo 2**64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    for shift, factor in _ROUNDS:
        bits = _shift_right(bits, shift).bitwise_xor_(bits).mul_(_signed(factor))
    return _shift_right(bits, 31).bitwise_xor_(bits)


def _mix_on_host(bits: int) -> int:
    """Computes ``_mix`` of one int without tensors: on a GPU, each operation is a launch."""
    bits &= (1 << 64) - 1
    for shift, factor in _ROUNDS:
        bits = ((bits ^ (bits >> shift)) * factor) & ((1 << 64) - 1)
    return bits ^ (bits >> 31)


def _starts(seeds: Sequence[int], name: str, word: int) -> list[int]:
    """Returns the first counter of a stream for each seed, as Python ints that fit int64."""
    key = zlib.crc32(f"{name}/{word}".encode()) * _GOLDEN
    return [_signed(_mix_on_host(key + seed * 0xD1342543DE82EF95) + _GOLDEN) for seed in seeds]


def _counters(
    seed: Seeds, name: str, shape: Sequence[int], device: torch.device | str, words: Sequence[int]
) -> torch.Tensor:
    """Returns the counters of some words of a stream, (words, seeds, elements per seed)."""
    seeds = (seed,) if isinstance(seed, int) else seed
    index = torch.arange(math.prod(shape) // len(seeds), dtype=torch.int64, device=device)
    # Without non_blocking, each copy would wait for all that the GPU has yet to do. The copy has
    # read the starts when it returns, since they are not in pinned memory.
    starts = torch.tensor([_starts(seeds, name, word) for word in words])
    starts = starts.to(device, non_blocking=True)
    return torch.add(starts.unsqueeze(2), index, alpha=_signed(_GOLDEN))


def integers(
    seed: Seeds, name: str, shape: Sequence[int], device: torch.device | str = "cpu", word: int = 0
) -> torch.Tensor:
    """Returns 64 pseudo-random bits per element as int64; ``word`` selects independent streams.

    Several seeds divide the first axis into equal parts. Each part has the values that its seed
    gives alone.
    """
    return _mix(_counters(seed, name, shape, device, (word,))).view(tuple(shape))


def uniform(
    seed: Seeds, name: str, shape: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns uniform float64 in [0, 1), multiples of 2**-53."""
    return _shift_right(integers(seed, name, shape, device), 11).to(torch.float64) * 2.0**-53


def normal(
    seed: Seeds, name: str, shape: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns nearly normal float64: mean 0, variance 1, symmetric, |x| <= 6.

    A value is the sum of twelve 16-bit uniforms (Irwin-Hall), exact in integers, so it does not
    depend on an implementation of logarithm or cosine.
    """
    words = _mix(_counters(seed, name, shape, device, (1, 2, 3)))
    # Four 16-bit chunks per word; the sum does not depend on their order. By default, PyTorch sums
    # in 64 bits, and copies the chunks to 64 bits first.
    chunks = words.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    total = chunks.view(3, -1, 4).sum((0, 2), dtype=torch.int32).view(tuple(shape))
    # Each chunk has mean 32767.5 and variance (2**32 - 1) / 12, so the sum's deviation is 2**16.
    return (total.to(torch.float64) - 12 * 32767.5) * 2.0**-16
