"""Formats to which a kernel may round an operand, in float64."""

from __future__ import annotations

import torch

from fa_verify.properties.inputs.families import TORCH_DTYPES

__all__ = ["OPERANDS", "UNIT", "clear_of_ties", "nearest_away", "rounded", "truncated"]

# Bits of the significand, with the leading one.
_BITS = {"fp16": 11, "bf16": 8, "fp32": 24, "tf32": 11}
# Largest relative error of a rounding to nearest.
UNIT = {name: 2.0**-bits for name, bits in _BITS.items()}
_NEAR = 2.0**-17


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float64 to nearest, ties to even, in the range of the dtype."""
    if dtype == "tf32":
        return _to_bits(x, torch.round)
    return x.to(torch.float32).to(TORCH_DTYPES[dtype]).double()


def truncated(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float64 towards 0, in the normal range of the dtype."""
    return _to_bits(x, torch.trunc, _BITS[dtype])


def _to_bits(x: torch.Tensor, how: object, bits: int = _BITS["tf32"]) -> torch.Tensor:
    significand, exponent = torch.frexp(x)
    return torch.ldexp(how(significand * 2.0**bits) * 2.0**-bits, exponent)  # type: ignore[operator]


def nearest_away(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float64 to nearest, ties away from 0, in the normal range of the dtype."""
    return _to_bits(
        x, lambda y: torch.trunc(y + torch.copysign(torch.tensor(0.5), y)), _BITS[dtype]
    )


def clear_of_ties(x: torch.Tensor, dtype: str, *, truncation: bool = False) -> torch.Tensor:
    """Return bool: whether an error of 2**-17 of x changes neither rounding nor truncation."""
    low, high = x * (1 - _NEAR), x * (1 + _NEAR)
    same = rounded(low, dtype) == rounded(high, dtype)
    if truncation:
        same &= truncated(low, dtype) == truncated(high, dtype)
    return same


def _twice(x: torch.Tensor) -> torch.Tensor:
    """The sum of two bf16 numbers: the operand of bf16x3."""
    high = rounded(x, "bf16")
    return high + rounded(x - high, "bf16")


# By name: the operand that a dot of fp32 inputs reads in place of x.
OPERANDS = {
    "ieee": lambda x: x,
    "tf32, truncated": lambda x: truncated(x, "tf32"),
    "tf32, nearest": lambda x: rounded(x, "tf32"),
    "tf32, nearest_away": lambda x: nearest_away(x, "tf32"),
    "bf16x3": _twice,
    "bf16, truncated": lambda x: truncated(x, "bf16"),
    "bf16, rounded": lambda x: rounded(x, "bf16"),
}
