"""The five outputs of attention, forward and backward, and a kernel's declared numerics."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["OUTPUTS", "Numerics", "Outputs"]

Array = TypeVar("Array")

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


class Outputs(NamedTuple, Generic[Array]):
    """One array per output: out (B,H,M,Dv), lse (B,H,M), and dq, dk, dv shaped as q, k, v."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A kernel's declared numerics, which select the error bound.

    The defaults describe the kernels of ``fa_kernels``.

    Args:
        dots: "ieee", or "tf32" for fp32 inputs whose dots run in TF32.
        tf32_conversion: Conversion of the operands of TF32 dots. "truncate" drops 13 bits, as
            tensor cores do with float32 numbers; "nearest" and "nearest_away" round to nearest,
            with ties to even (``cvt.rn.tf32``) or away from 0 (``cvt.rna.tf32``). "unknown" allows
            each of them.
        accumulator: h, the accumulation constant: 1 for IEEE fp32 and Hopper, 2 for A100-like,
            4 for V100-like tensor cores.
        block_n: Width of the key tiles, 16 if unknown.
        prescales: Operands multiplied by the scale and rounded before the dot: "none", "q", "k",
            "qk".
        p_dtype: P is cast to the "input" dtype before its dot, or stays "fp32".
        ds_scaled: dS is multiplied by sm_scale before its cast.
        ds_roundings: Number of times that dS (and P) is rounded to its dtype.
        p_normalised: P is normalised before its cast.
        l_order: The softmax sum runs in "any" order, or "tile" by tile.
        l_tile: Keys of a tile whose weights one sum adds, where the softmax sum runs tile by tile.
            0 means ``block_n``.
        ds_from: dS is computed from the "unrounded" P, or from P "rounded" to its dtype, if a
            kernel keeps one P for both of its dots.
        l_from: l is summed from the "unrounded" or the "rounded" P.
        group_sum: dk and dv are summed over a group of heads in "fp32" or in their "dtype".
        splits: The most programs that a row's key tiles are divided among. Each visits consecutive
            tiles with its own maximum, and combining their sums takes one more rescale. 1 means no
            splits.
        atomic: The outputs out of "dq", "dk" and "dv" that are summed in memory by atomics: one
            addition per tile of keys (dq) or rows, in no fixed order. Subnormal float32 operands
            and sums count as 0, as in ``red.global.add.f32`` of NVIDIA GPUs.
        partial_sums: Atomics add in "fp32", or each tile's sum is rounded to the "input" dtype and
            added in it.
        rescale_threshold: The rise of a row's maximum, in powers of 2 and at most 15, up to which
            sums stay relative to the earlier maximum. 0 rescales at every rise.
        flushes: Elementwise float32 operands and results below 2**-126 count as 0, as in code
            compiled with fast-math flags (``.ftz``). Operands and sums of dots do not.
        backward_reads: The results of the forward that the backward reads as they were returned,
            out of "out" and "lse". It computes delta from out, and P from lse, or from the maximum
            and the sum, "m_and_l", that lse was computed from. () if it reads neither, as in
            automatic differentiation of a softmax, or if nothing is known. Gradients are judged
            given what is read.
        softcap_slope: The derivative of tanh is the "difference" 1 - tanh**2, as in automatic
            differentiation, which loses all digits where tanh is nearly 1; or it is "exact", to a
            few roundings of itself.
        dequantised: The products of codes and scales of a cache are "exact" but for roundings to
            float32, or operands of dots are "rounded" to the dtype of q.
        v_scale_on: Scales of values multiply "v" or its sums, or "p" before its cast.

    Raises:
        ValueError: A declaration is out of range.
    """

    dots: str = "ieee"
    tf32_conversion: str = "unknown"
    accumulator: float = 1.0
    block_n: int = 16
    prescales: str = "none"
    p_dtype: str = "input"
    ds_scaled: bool = False
    ds_roundings: int = 1
    p_normalised: bool = False
    l_order: str = "any"
    l_tile: int = 0
    ds_from: str = "unrounded"
    l_from: str = "unrounded"
    group_sum: str = "fp32"
    splits: int = 1
    atomic: tuple[str, ...] = ()
    partial_sums: str = "fp32"
    rescale_threshold: float = 0.0
    flushes: bool = False
    backward_reads: tuple[str, ...] = ()
    softcap_slope: str = "difference"
    dequantised: str = "exact"
    v_scale_on: str = "v"

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """The outputs whose partial sums are rounded to the dtype of the inputs."""
        return self.atomic if self.partial_sums == "input" else ()

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {known}")
        for name in ("accumulator", "block_n", "ds_roundings", "splits"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs a number >= 1")
        if not self.l_tile >= 0:
            raise ValueError(f"l_tile is {self.l_tile!r}; needs a number >= 0")
        if not 0 <= self.rescale_threshold <= MOST_PUT_OFF:
            raise ValueError(
                f"rescale_threshold is {self.rescale_threshold!r}; needs a number from 0 to "
                f"{MOST_PUT_OFF}, since P is cast relative to the earlier maximum"
            )


# P reaches 2**rescale_threshold: 2**15 is in the range of fp16, 2**16 is not.
MOST_PUT_OFF = 15
_CHOICES = {
    "dots": ("ieee", "tf32"),
    "tf32_conversion": ("unknown", "truncate", "nearest", "nearest_away"),
    "prescales": ("none", "q", "k", "qk"),
    "p_dtype": ("input", "fp32"),
    "l_order": ("any", "tile"),
    "ds_from": ("unrounded", "rounded"),
    "l_from": ("unrounded", "rounded"),
    "group_sum": ("fp32", "dtype"),
    "atomic": tuple(x for n in range(4) for x in itertools.combinations(("dq", "dk", "dv"), n)),
    "partial_sums": ("fp32", "input"),
    "backward_reads": (
        (),
        ("out",),
        ("lse",),
        ("out", "lse"),
        ("m_and_l",),
        ("out", "m_and_l"),
    ),
    "softcap_slope": ("difference", "exact"),
    "dequantised": ("exact", "rounded"),
    "v_scale_on": ("v", "p"),
}
