"""The five outputs of attention, forward and backward, and a kernel's declared numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fa_verify.oracles.declaration import (
    declarations_of,
    declared,
    one_of,
    some_number,
    some_of,
    whole_number,
)

__all__ = ["LONGEST_TILE", "MOST_PUT_OFF", "OUTPUTS", "Numerics", "Outputs"]

Array = TypeVar("Array")

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


class Outputs(NamedTuple, Generic[Array]):
    """One array per output: out (B,H,M,Dv), lse (B,H,M), and dq, dk, dv shaped as q, k, v."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


# P reaches 2**rescale_threshold: 2**15 is in the range of fp16, 2**16 is not.
MOST_PUT_OFF = 15
# A whole row as one tile.
LONGEST_TILE = 2**20
_READ = (("out", "lse"), ("out", "m_and_l"))


def _read_results(where: str, given: object) -> tuple[str, ...]:
    """Return ``backward_reads``; lse, and m and l that it is computed from, exclude each other."""
    words: tuple[str, ...] = some_of(("out", "lse", "m_and_l"))(where, given)
    if not any({*words} <= {*allowed} for allowed in _READ):
        raise ValueError(f"{where} is {words}; needs some of one of {_READ}")
    return words


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A kernel's declared numerics, which select the error bound.

    The defaults describe the kernels of ``fa_kernels``.

    Each field has its meaning and its values beside it, in the words of docs/declarations.md.

    Raises:
        ValueError: A declaration is out of range.
    """

    dots: str = declared(
        "ieee",
        '"ieee", or "tf32" for fp32 inputs whose dots run in TF32',
        one_of("ieee", "tf32"),
        "numerics",
        is_assumed=True,
    )
    tf32_conversion: str = declared(
        "unknown",
        'how TF32 dots convert their operands: "truncate" (tensor cores drop the low 13 bits of '
        'float32 numbers), "nearest" with ties to even (`cvt.rn.tf32`), "nearest_away" with ties '
        'away from 0 (`cvt.rna.tf32`), or "unknown". It holds for all operands: q, k, v, dout, P '
        "and dS. A known conversion is [replayed](error-bound.md#conversions-to-tf32)",
        one_of("unknown", "truncate", "nearest", "nearest_away"),
        "numerics",
    )
    accumulator: float = declared(
        1.0,
        "the accumulation constant h: 1 for IEEE fp32 and Hopper, 2 for A100-like, 4 for "
        "V100-like tensor cores",
        some_number(1, 64),
        "numerics",
    )
    block_n: int = declared(
        16,
        "width of the key tiles; 16 where it is unknown",
        whole_number(1, LONGEST_TILE),
        "numerics",
    )
    prescales: str = declared(
        "none",
        'operands multiplied by the scale and rounded before the dot: "none", "q", "k", "qk"',
        one_of("none", "q", "k", "qk"),
        "numerics",
        is_assumed=True,
    )
    p_dtype: str = declared(
        "input",
        'P is cast to the "input" dtype before its dot, or stays "fp32"',
        one_of("input", "fp32"),
        "numerics",
    )
    p_normalised: bool = declared(
        False,
        "P is divided by its sum before the cast",
        one_of(False, True),
        "numerics",
        is_assumed=True,
    )
    ds_scaled: bool = declared(
        False,
        "dS is multiplied by `sm_scale` before its cast",
        one_of(False, True),
        "numerics",
        is_assumed=True,
    )
    ds_roundings: int = declared(
        1,
        "how often dS and P are rounded to their dtype",
        whole_number(1, 4),
        "numerics",
    )
    ds_from: str = declared(
        "unrounded",
        'dS is computed from the "unrounded" P, or from P "rounded" to its dtype',
        one_of("unrounded", "rounded"),
        "numerics",
        is_assumed=True,
    )
    l_order: str = declared(
        "any",
        'the softmax sum runs in "any" order, or "tile" by tile',
        one_of("any", "tile"),
        "numerics",
    )
    l_tile: int = declared(
        0,
        "how many keys a tile adds at once to the softmax sum, where it runs tile by tile; 0 "
        "takes the width of `tiles`, or `block_n`",
        whole_number(0, LONGEST_TILE),
        "numerics",
    )
    l_from: str = declared(
        "unrounded",
        'the softmax sum adds the "unrounded" or the "rounded" P',
        one_of("unrounded", "rounded"),
        "numerics",
        is_assumed=True,
    )
    group_sum: str = declared(
        "fp32",
        'dk and dv are summed over a group of heads in "fp32", or in their "dtype"',
        one_of("fp32", "dtype"),
        "numerics",
    )
    splits: int = declared(
        1,
        "the largest number of programs that share the key tiles of a row",
        whole_number(1, 4096),
        "numerics",
        is_assumed=True,
    )
    atomic: tuple[str, ...] = declared(
        (),
        'outputs that are summed in memory by atomic additions, out of "dq", "dk" and "dv"',
        some_of(("dq", "dk", "dv")),
        "numerics",
    )
    partial_sums: str = declared(
        "fp32",
        'atomics add in "fp32", or each tile\'s sum is rounded to the "input" dtype and added in '
        "it, as by `red.add.bf16`",
        one_of("fp32", "input"),
        "numerics",
    )
    rescale_threshold: float = declared(
        0.0,
        "by how many powers of 2 a row's maximum may rise before its sums are rescaled, up to 15",
        some_number(0, MOST_PUT_OFF, ", since P is cast relative to the earlier maximum"),
        "numerics",
        is_assumed=True,
    )
    flushes: bool = declared(
        False,
        "elementwise float32 numbers below 2**-126 count as 0",
        one_of(False, True),
        "numerics",
    )
    softcap_slope: str = declared(
        "difference",
        'the slope of a softcap is the "difference" 1 - tanh**2, as in automatic differentiation,'
        ' which loses its digits where tanh is nearly 1; or "exact", to a few roundings of '
        "itself, as from exp(-2 \\|x / c\\|). [The "
        "difference](error-bound.md#the-slope-of-a-softcap) is the default, and the wider bound",
        one_of("difference", "exact"),
        "numerics",
    )
    backward_reads: tuple[str, ...] = declared(
        (),
        'results of the forward that the backward reads as they were returned: "out", for delta, '
        'and "lse". "m_and_l" replaces "lse" where P is recomputed from the maximum and the sum '
        "of a row. `()`, the default, is for automatic differentiation and for kernels of which "
        "nothing is known. Declare what a FlashAttention reads: its gradients are then [judged "
        "given them](error-bound.md#the-backward-given-the-forward)",
        _read_results,
        "numerics",
    )

    dequantised: str = declared(
        "exact",
        'products of codes and scales of a cache are "exact" but for float32 roundings, or '
        'operands of dots that are "rounded" to the dtype of q: [Formats](formats.md)',
        one_of("exact", "rounded"),
        "numerics",
    )
    v_scale_on: str = declared(
        "v",
        'scales of values multiply "v" or its sums, or "p" before its cast',
        one_of("v", "p"),
        "numerics",
    )

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """The outputs whose partial sums are rounded to the dtype of the inputs."""
        return self.atomic if self.partial_sums == "input" else ()

    def __post_init__(self) -> None:
        for name, known in declarations_of(self):
            given = getattr(self, name)
            allowed = known.values(name, given)
            if allowed != given:
                raise ValueError(f"{name} is {given!r}; needs {allowed!r}")
