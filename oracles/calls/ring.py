"""The problem of a ring over parts of the keys, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fa_verify.oracles.calls.of_attention import OfAttention
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem

__all__ = ["RingProblem"]


@dataclass(frozen=True, kw_only=True)
class RingProblem(OfAttention):
    """Everything that determines the bits of a ring: attention to parts of the keys, merged.

    Args:
        attention: The attention to all keys, with a mask that is causal or shows everything.
        lengths: The number of keys of each part; N in sum.

    Raises:
        ValueError: The lengths are negative or do not add up to N, or the mask is another one.
    """

    kind: ClassVar[str] = "ring"

    attention: Problem = field(default_factory=Problem)
    lengths: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        lengths, mask = self.lengths, self.attention.mask
        if min(lengths, default=0) < 0 or sum(lengths) != self.attention.N:
            raise ValueError(f"lengths are {lengths!r}; needs N = {self.attention.N} keys in sum")
        if mask not in (Mask(), Mask(causal=True)):
            raise ValueError(f"mask is {mask!r}; needs one that is causal, or none")

    def record(self) -> dict[str, Any]:
        """Returns the record of the attention, and the lengths as "ring"."""
        return self.attention.record() | {"ring": {"lengths": list(self.lengths)}}

    @classmethod
    def from_record(cls, record: dict[str, object]) -> RingProblem:
        """Reads the output of ``to_json`` after JSON parsing.

        Raises:
            ValueError: A field is unknown or has an invalid value.
        """
        fields = dict(record)
        ring = fields.pop("ring")
        try:
            (name, lengths), *others = ring.items()  # type: ignore[attr-defined]
            if name != "lengths" or others or not all(type(x) is int for x in lengths):
                raise ValueError(f"ring is {ring!r}; needs lengths alone, a list of ints")
        except (AttributeError, TypeError) as error:
            raise ValueError(f"problem is malformed: {error}") from None
        return cls(attention=Problem.from_record(fields), lengths=tuple(lengths))
