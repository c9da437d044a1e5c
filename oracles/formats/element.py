"""The formats of 8 bits that keys and values are stored in, as values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["FORMATS", "OVERFLOWS", "ROUNDINGS", "ElementFormat", "format_of"]

# To nearest with ties to even, and toward 0.
ROUNDINGS = ("nearest", "truncate")
# A number beyond the largest becomes the largest, or the format's infinity or NaN.
OVERFLOWS = ("saturate", "nan")


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A format of one byte: a sign, an exponent and a mantissa, or an integer.

    A float with exponent field E and mantissa field f is ``(2**mantissa + f) 2**(E - bias -
    mantissa)``, and ``f 2**(1 - bias - mantissa)`` for E = 0.

    Args:
        name: Its name in problems and declarations.
        dtype: The dtype of tensors of codes.
        mantissa: Bits of the mantissa field; 0 for the integer.
        bias: The exponent's bias. With 1, an integer is a float without normal numbers.
        largest_code: The code of the largest finite number.
        overflow_code: The code of a number beyond it, where a cast does not saturate; None if the
            format has none, so that every cast saturates.
        nan_code: A code of NaN; None if there is none.

    Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, for e4m3fn and e5m2.
    """

    name: str
    dtype: torch.dtype
    mantissa: int
    bias: int
    largest_code: int
    overflow_code: int | None
    nan_code: int | None

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers in two's complement."""
        return self.mantissa == 0

    @property
    def spacing(self) -> float:
        """The least subnormal number, and the distance of numbers near 0."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def least_normal(self) -> float:
        """The least normal number; the spacing for the integer."""
        return 2.0 ** (1 - self.bias)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return self.magnitude(self.largest_code)

    def magnitude(self, code: int) -> float:
        """Returns the absolute value of a finite code without its sign."""
        exponent, fraction = divmod(code, 1 << self.mantissa)
        if self.is_integer:
            return float(code)
        if exponent:
            fraction += 1 << self.mantissa
        return float(fraction) * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa)


# e4m3fn has no infinity. int8 reaches -128, one further than its largest number.
FORMATS: dict[str, ElementFormat] = {
    x.name: x
    for x in (
        ElementFormat(
            name="e4m3fn", dtype=torch.float8_e4m3fn, mantissa=3, bias=7, largest_code=0x7E,
            overflow_code=0x7F, nan_code=0x7F,
        ),
        ElementFormat(
            name="e5m2", dtype=torch.float8_e5m2, mantissa=2, bias=15, largest_code=0x7B,
            overflow_code=0x7C, nan_code=0x7E,
        ),
        ElementFormat(
            name="int8", dtype=torch.int8, mantissa=0, bias=1, largest_code=127,
            overflow_code=None, nan_code=None,
        ),
    )
}  # fmt: skip


def format_of(dtype: torch.dtype) -> ElementFormat | None:
    """Returns the format whose codes a tensor holds; None for the dtypes of inputs."""
    return next((x for x in FORMATS.values() if x.dtype == dtype), None)
