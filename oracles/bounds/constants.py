"""The unit roundoffs and thresholds of the error bound, for one input dtype and declaration."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TypeVar

import torch

from fa_verify.oracles.outputs import Numerics

__all__ = ["Constants", "constants"]

Count = TypeVar("Count", float, torch.Tensor)

# Unit roundoff; largest error of a rounding below the smallest normal number, where a result may
# be flushed to zero; largest finite value.
_FORMATS = {
    "fp16": (2.0**-11, 2.0**-25, 65504.0),
    "bf16": (2.0**-8, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "fp32": (2.0**-24, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "fp64": (2.0**-53, 2.0**-1022, sys.float_info.max),
}
_SHORTEST_DOT = 16  # a tensor core pads shorter dots
_ALIGNED = 16  # products that a tensor core adds at a time, at most
# The smallest normal operand of a tensor core.
_SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126, "fp32": 2.0**-126}


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the bound; u_* are relative errors, eta_* absolute errors.

    Args:
        u: Unit roundoff of the accumulators.
        ftz: Smallest normal accumulator value: the most that a flush to zero can lose.
        u_exp: Error of the exponential.
        u_log: Error of the logarithm.
        u_in: Unit roundoff of the dtype of inputs and outputs.
        eta_in: Error of a rounding to that dtype that underflows.
        u_p: Error of all casts of P and dS together.
        eta_p: Error of these casts if they underflow.
        u_x: Error of a dot's operand beyond its dtype, as in TF32.
        u_given: The same of an operand that is an input: 0 if its conversion is replayed, and that
            of the scales of a dequantised input.
        eta_x: Error of a subnormal operand of a dot, ``eta_a`` included.
        eta_a: Loss of a sum on tensor cores by one subnormal operand, per unit of the other
            operand of its product.
        eta_op: Magnitude below which elementwise arithmetic may flush an operand or result to zero,
            apart from casts, P and dS.
        h: Number of roundings that an addition in a dot counts as.
        times: Factor on the finished bound.
        max_in: Largest finite value of the dtype of inputs and outputs.
        max_p: Largest finite value of the dtype of the cast P and dS.
        max_acc: Largest finite accumulator value.
        p_factor: The least factor on P before its cast, at most 1.
    """

    u: float
    ftz: float
    u_exp: float
    u_log: float
    u_in: float
    eta_in: float
    u_p: float
    eta_p: float
    u_x: float
    u_given: float
    eta_x: float
    eta_a: float
    eta_op: float
    h: float
    times: float
    max_in: float
    max_p: float
    max_acc: float
    p_factor: float = 1.0

    def eta_prescaled(self, prescales: str, sm_scale: float) -> float:
        """The error of a score if a prescaled operand underflows, per unit of the other operand.

        The operand is q sm_scale log2(e) (or k); for "qk", each operand gets the square root of the
        factor. If arithmetic flushes, q may count as 0 before it is multiplied.
        """
        split = math.sqrt(sm_scale * math.log(2)) if prescales == "qk" else 0.0
        lost = self.eta_in + self.eta_op * max(1.0, sm_scale / math.log(2))
        return lost * max(math.log(2), split)

    @property
    def u_dot(self) -> float:
        """Relative error of a product whose two operands are inputs: (1 + u_given)**2 - 1."""
        # Expanded, because 1 + u is 1 in float64 if u is the roundoff of float64.
        return 2 * self.u_given + self.u_given**2

    @property
    def eta_dot(self) -> float:
        """The error of a product with a subnormal operand, per unit of the other operand."""
        return self.eta_x * (1 + self.u_dot)

    @property
    def u_cast(self) -> float:
        """Relative error of a product with P or dS: (1 + u_p)(1 + u_x)(1 + u_given) - 1.

        P or dS is cast, then the dot converts both operands.
        """
        both = self.u_x + self.u_given + self.u_x * self.u_given
        return self.u_p + both + self.u_p * both

    def gamma(self, n: Count) -> Count:
        """Relative error of n additions, each with error u."""
        error = n * self.u
        return error / (1 - error)

    def g(self, n: Count) -> Count:
        """Relative error of a dot of n products."""
        error = n * (self.h * self.u)
        return error / (1 - error)

    def in_memory(
        self, bound: torch.Tensor, size: torch.Tensor, tiles: torch.Tensor, u: float
    ) -> torch.Tensor:
        """The error of a sum of tiles that are rounded to the dtype and added in it, in any order.

        Each tile passes through its own rounding and all T - 1 additions but the first, as the
        first is one to 0::

            B + r (S + B) + (1 + r) T (eta_in + 2 FTZ),  1 + r = exp(u) (1 + u_in)**T

        Atomics flush a subnormal addend and a subnormal sum.

        Args:
            bound: B, the error of the sum without these roundings.
            size: S, the sum of the largest |terms| of a correct kernel.
            tiles: T, broadcasts to ``bound``.
            u: Error of the operations on a tile before it is rounded.
        """
        r = (tiles * math.log1p(self.u_in) + u).expm1()
        return bound + r * (size + bound) + (1 + r) * tiles * (self.eta_in + 2 * self.ftz)

    def short_dot(self, D: int) -> float:
        """Error of a dot of two inputs of length D, relative to A0: accumulation and operands."""
        accumulated = self.g(float(max(D, _SHORTEST_DOT)))
        return accumulated * (1 + self.u_dot) + self.u_dot


# TF32 keeps 10 of 23 bits, of a subnormal number too, whose last bit is 2**-149.
_CONVERSIONS = {
    "unknown": (2.0**-10, 2.0**-136),
    "truncate": (2.0**-10, 2.0**-136),
    "nearest": (2.0**-11, 2.0**-137),
    "nearest_away": (2.0**-11, 2.0**-137),
}


def constants(
    in_dtype: str, numerics: Numerics, *, replayed: bool = False, dequantised: bool = False
) -> Constants:
    """Returns the constants for tensors of ``in_dtype`` under the declared numerics.

    Tensor cores shift the products that they add at a time to the largest exponent among them, and
    cut off what lies below h u of it. They take that exponent from the operands before their
    product is normalised, and the exponent of a subnormal operand is that of the smallest normal
    number. With one subnormal operand, each of up to 16 products loses h u times that number times
    the other operand.

    Accumulators are fp32. For "fp64" inputs they are float64, and the finished bound is doubled,
    because the oracle has an error of the same size.

    Args:
        in_dtype: "fp16", "bf16", "fp32" or "fp64".
        numerics: The subject's declared numerics.
        replayed: Whether inputs are given as dots read them.
        dequantised: Whether k or v is given in a wider dtype than q. It is exact in it but for one
            rounding, of a stored number times its scale. A kernel that multiplies a dot by the
            scale instead rounds once more.

    Raises:
        ValueError: in_dtype is unknown.
    """
    if in_dtype not in _FORMATS:
        raise ValueError(f"in_dtype is {in_dtype!r}; needs one of {tuple(_FORMATS)}")
    double = in_dtype == "fp64"
    u_in, eta_in, max_in = _FORMATS[in_dtype]
    uncast = numerics.p_dtype == "fp32" and not double
    u_p, eta_p, max_p = _FORMATS["fp32" if uncast else in_dtype]
    rounds = numerics.ds_roundings
    if rounds != 1:
        u_p, eta_p = math.expm1(rounds * math.log1p(u_p)), rounds * eta_p
    u_x, eta_x, eta_a = 0.0, 0.0, 0.0
    u, ftz, max_acc = _FORMATS["fp64" if double else "fp32"]
    in_tf32 = numerics.dots == "tf32" and in_dtype == "fp32"
    if in_tf32:
        u_x, eta_x = _CONVERSIONS[numerics.tf32_conversion]
    if in_tf32 or in_dtype in ("fp16", "bf16"):
        eta_a = _ALIGNED * numerics.accumulator * u * _SMALLEST_NORMAL[in_dtype]
    return Constants(
        u=u,
        ftz=ftz,
        u_exp=2.0**-51 if double else 2.0**-22,  # ex2.approx
        u_log=2.0**-51 if double else 2.0**-22,  # lg2.approx
        u_in=u_in,
        eta_in=eta_in,
        u_p=u_p,
        eta_p=eta_p,
        u_x=u_x,
        u_given=2 * u if dequantised else 0.0 if replayed else u_x,
        eta_x=eta_x + eta_a,
        eta_a=eta_a,
        eta_op=ftz if numerics.flushes else 0.0,
        h=float(numerics.accumulator),
        times=2.0 if double else 1.0,
        max_in=max_in,
        max_p=max_p,
        max_acc=max_acc,
    )
