"""The five outputs of attention, forward and backward, and what a subject says of its numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["OUTPUTS", "Numerics", "Outputs"]

Array = TypeVar("Array")

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


class Outputs(NamedTuple, Generic[Array]):
    """One array per output: out (B,H,M,Dv), lse (B,H,M), dq, dk, dv shaped as q, k, v."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The declarations that choose the error bound; the defaults are those of our kernels.

    Args:
        dots: "ieee", or "tf32" for fp32 inputs whose dots run in TF32.
        accumulator: h, the accumulation constant: 1 for IEEE fp32 and Hopper, 2 for A100-like,
            4 for V100-like tensor cores.
        block_n: Width of the key tiles, 16 where unknown.
        prescales: Operands multiplied by the scale and rounded before the dot: "none", "q", "k",
            "qk".
        p_dtype: P is cast to the "input" dtype before its dot, or stays "fp32".
        ds_scaled: dS is multiplied by sm_scale before its cast.
        ds_roundings: How often dS (and P) is rounded to its dtype.
        p_normalised: Softmax first, then the cast.
        l_order: The softmax sum runs in "any" order, or "tile" by tile.
        ds_from: dS is made of the "unrounded" P, or of P "rounded" to its dtype, as a kernel does
            that keeps one P for both of its dots.
        l_from: l is summed from the "unrounded" or the "rounded" P.
        group_sum: dk, dv are summed over a group of heads in "fp32" or in their "dtype".
        splits: Among how many programs, at most, a row's key tiles are divided: each goes through
            some that follow each other with a maximum of its own, and one more rescale merges
            their sums. 1: nothing is merged.
        atomic: The outputs, ("dq",) or none, that are summed in memory by atomics: key tile by key
            tile, in an order of chance, and with subnormal operands and sums of float32 taken for
            0, as ``red.global.add.f32`` of NVIDIA GPUs does.
        rescale_threshold: By how much a row's maximum may rise, in powers of 2 and up to 15, before
            its sums are rescaled: until then they are relative to a maximum of before. 0: they are
            rescaled whenever it rises.
        flushes: Elementwise float32 operands and results below 2**-126 count as 0, as in code that
            was compiled with fast-math flags (``.ftz``); operands and sums of dots do not.
    """

    dots: str = "ieee"
    accumulator: float = 1.0
    block_n: int = 16
    prescales: str = "none"
    p_dtype: str = "input"
    ds_scaled: bool = False
    ds_roundings: int = 1
    p_normalised: bool = False
    l_order: str = "any"
    ds_from: str = "unrounded"
    l_from: str = "unrounded"
    group_sum: str = "fp32"
    splits: int = 1
    atomic: tuple[str, ...] = ()
    rescale_threshold: float = 0.0
    flushes: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {known}")
        for name in ("accumulator", "block_n", "ds_roundings", "splits"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs a number >= 1")
        if not 0 <= self.rescale_threshold <= MOST_PUT_OFF:
            raise ValueError(
                f"rescale_threshold is {self.rescale_threshold!r}; needs a number from 0 to "
                f"{MOST_PUT_OFF}, since P is cast relative to the maximum of before"
            )


# 2**15 is in the range of fp16, 2**16 is not.
MOST_PUT_OFF = 15
_CHOICES = {
    "dots": ("ieee", "tf32"),
    "prescales": ("none", "q", "k", "qk"),
    "p_dtype": ("input", "fp32"),
    "l_order": ("any", "tile"),
    "ds_from": ("unrounded", "rounded"),
    "l_from": ("unrounded", "rounded"),
    "group_sum": ("fp32", "dtype"),
    "atomic": ((), ("dq",)),
}
