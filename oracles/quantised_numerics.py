"""The declared numerics of a kernel whose q, k and v are codes with scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fa_verify.oracles.declaration import declarations_of, declared, one_of, whole_number
from fa_verify.oracles.formats.element import FORMATS

__all__ = ["HOPPER_BITS", "QuantisedNumerics", "quantised_numerics"]

# Hopper's fp8 tensor cores keep the leading bit and 13 below it, of sums over 32 products each.
HOPPER_BITS = 14
_BITS = (24, HOPPER_BITS, 13, 11)
_MOST_OFFSET = 15


def _offset(where: str, given: object) -> object:
    """Check that an offset is an exponent, or the word for the largest number of the format."""
    return given if given == "largest" else whole_number(0, _MOST_OFFSET)(where, given)


@dataclass(frozen=True, kw_only=True)
class QuantisedNumerics:
    """The roundings of a kernel of codes, beside ``block_n``, ``rescale_threshold`` and ``l_from``.

    Raises:
        ValueError: A declaration is out of range.
    """

    p_format: str = declared(
        "e4m3fn",
        'the format that P is cast to before its dot: "e4m3fn", "e5m2", "fp16" or "bf16"',
        one_of("e4m3fn", "e5m2", "fp16", "bf16"),
        "quantised",
    )
    p_offset: int | str = declared(
        0,
        "the power of two by which P is multiplied before its cast, an exponent from 0 to 15; or "
        '"largest", for the largest number of the format. The softmax sum has the same factor',
        _offset,
        "quantised",
    )
    p_rounding: str = declared(
        "nearest",
        'P is rounded to "nearest" with ties to even, or by "truncate"',
        one_of("nearest", "truncate"),
        "quantised",
    )
    qk_bits: int = declared(
        24,
        "bits that the sums of QK^T keep, with the leading one: 24 for fp32, and 14 or 13, which "
        "truncate sums of 32 products, for Hopper's fp8 tensor cores. Dots of int8 are exact",
        one_of(*_BITS[:3]),
        "quantised",
    )
    pv_bits: int = declared(
        24,
        "bits that the sums of PV keep, as above, and 11 for sums in fp16",
        one_of(*_BITS),
        "quantised",
    )
    pv_promotion: str = declared(
        "tile",
        "how long a sum of PV of fewer than 24 bits grows before it is added in fp32: a "
        '"step" of 32 keys, a "tile", or a "row"',
        one_of("step", "tile", "row"),
        "quantised",
    )
    key_order: str = declared(
        "first",
        'the key tiles are visited from the "first", or from the "last"',
        one_of("first", "last"),
        "quantised",
    )

    def __post_init__(self) -> None:
        for name, known in declarations_of(self):
            known.values(name, getattr(self, name))
        if self.p_offset == "largest" and self.p_format not in FORMATS:
            raise ValueError(f"p_offset is 'largest'; needs P in 8 bits, not in {self.p_format}")

    @property
    def offset(self) -> float:
        """The binary logarithm of the factor on P before its cast."""
        if self.p_offset == "largest":
            return math.log2(FORMATS[self.p_format].largest)
        return float(self.p_offset)

    def saturates(self, rescale_threshold: float) -> bool:
        """Returns whether P, relative to a maximum that is put off, exceeds its format."""
        largest = FORMATS[self.p_format].largest if self.p_format in FORMATS else 65504.0
        return self.p_format != "bf16" and 2.0 ** (self.offset + rescale_threshold) > largest * (
            1 + 2.0**-20
        )


def quantised_numerics(where: str, given: object) -> QuantisedNumerics:
    """Returns numerics from a dict of their words, or as they are.

    Raises:
        ValueError: A word is unknown or has an invalid value.
    """
    if isinstance(given, QuantisedNumerics):
        return given
    known = [name for name, _ in declarations_of(QuantisedNumerics)]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}; needs a dict of some of {known}")
    if unknown := [word for word in given if word not in known]:
        raise ValueError(f"{where} has {unknown}; known are {known}")
    try:
        return QuantisedNumerics(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
