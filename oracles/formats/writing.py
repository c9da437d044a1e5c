"""The rule by which a kernel makes codes and scales of the keys and values that it appends."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fa_verify.oracles.formats.element import OVERFLOWS, ROUNDINGS

__all__ = ["WRITTEN_BY", "Writing"]

# x / scale, or x times the rounded reciprocal of the scale.
WRITTEN_BY = ("division", "reciprocal")
_CHOICES = {
    # "half_added" adds 0.5 to |x| in float32 and truncates, as kernels of integers do.
    "rounding": (*ROUNDINGS, "half_added"), "overflow": OVERFLOWS, "by": WRITTEN_BY,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The rule that makes codes of numbers x, and scales of heads, in float32 arithmetic.

    A scale per token and head is ``max(least_scale, max |x| / largest)`` over the channels of a
    token's head, where ``largest`` is the format's largest number. Other scales are inputs. Where a
    scale is 0, so are the codes.

    Args:
        rounding: "nearest" (ties to even), "truncate" or "half_added".
        overflow: "saturate", or "nan" for the format's infinity or NaN.
        by: "division" by the scale, or multiplication by its "reciprocal", rounded to float32.
        least_scale: The least scale, >= 0, rounded to float32.

    Raises:
        ValueError: A value is none of these.
    """

    rounding: str = "nearest"
    overflow: str = "saturate"
    by: str = "division"
    least_scale: float = 0.0

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {known}")
        number = isinstance(self.least_scale, int | float)
        if not (number and 0 <= self.least_scale < math.inf):
            raise ValueError(f"least_scale is {self.least_scale!r}; needs a finite number >= 0")

    def record(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != item.default
        }
