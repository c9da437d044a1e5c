"""The problem of attention over a cache, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fa_verify.oracles.calls.of_attention import OfAttention
from fa_verify.oracles.formats.element import FORMATS, ElementFormat
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem

__all__ = ["OF_INPUTS", "PAGE_ORDERS", "SCALES", "CacheProblem"]

PAGE_ORDERS = ("drawn", "ascending", "descending")
# The format of a cache that has the dtype of q.
OF_INPUTS = "input"
# The places that share a scale: all; those of a head; those of a page and head; a row and head.
SCALES = ("tensor", "head", "page", "token_head")


@dataclass(frozen=True, kw_only=True)
class CacheProblem(OfAttention):
    """Everything that determines the bits of a call with a cache.

    Args:
        attention: The attention of the queries to the keys that the cache holds after the call. Its
            mask has lengths of keys and none of queries.
        page_size: Rows of a page; 0 for a contiguous cache.
        new: The last keys of each entry that the call appends.
        shared: The first pages of each entry that all entries share.
        spare: Pages, and places of the table, that no entry uses; of a contiguous cache, entries.
        order: One of ``PAGE_ORDERS``: how pages, or the entries of a contiguous cache, lie beside
            the order of the table. The seed gives the one that is drawn.
        stored: The format of the cached keys and values: "input", or one of ``FORMATS``.
        scales: One of ``SCALES``: the places of a cache of codes that share a scale.
        divides: Whether a number is its code divided by the scale, and not times it.

    Raises:
        ValueError: A size is negative, or the fields contradict each other.
    """

    kind: ClassVar[str] = "cache"

    attention: Problem = field(default_factory=lambda: Problem(mask=Mask(seqlens_k=(1,))))
    page_size: int = 0
    new: int = 0
    shared: int = 0
    spare: int = 0
    order: str = "drawn"
    stored: str = OF_INPUTS
    scales: str = SCALES[0]
    divides: bool = False

    def __post_init__(self) -> None:
        mask = self.attention.mask
        if mask.seqlens_k is None or mask.seqlens_q is not None:
            raise ValueError(f"mask is {mask!r}; needs seqlens_k and no seqlens_q")
        for name in ("page_size", "new", "shared", "spare"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs an int >= 0")
        if self.order not in PAGE_ORDERS:
            raise ValueError(f"order is {self.order!r}; needs one of {PAGE_ORDERS}")
        least = min(self.before, default=self.attention.N)
        if least < 0:
            raise ValueError(f"new is {self.new}; needs at most the keys of each entry")
        if self.shared * self.page_size > least or (self.shared and not self.page_size):
            raise ValueError(f"shared is {self.shared}; needs pages that hold no new key")
        self._check_format()

    def _check_format(self) -> None:
        """Checks the fields of a cache of codes."""
        if self.stored not in (OF_INPUTS, *FORMATS):
            raise ValueError(f"stored is {self.stored!r}; needs one of {(OF_INPUTS, *FORMATS)}")
        if self.scales not in SCALES:
            raise ValueError(f"scales is {self.scales!r}; needs one of {SCALES}")
        if self.format is None and (self.scales != SCALES[0] or self.divides):
            raise ValueError(f"scales is {self.scales!r}; needs {SCALES[0]!r} without codes")
        if self.scales == "page" and (self.new or not self.page_size):
            raise ValueError("scales is 'page'; needs pages, and no new keys")
        if self.scales == "token_head" and self.new and self.divides:
            raise ValueError("scales is 'token_head'; needs scales that multiply, with new keys")

    @property
    def format(self) -> ElementFormat | None:
        """The format of the codes; None for a cache that has the dtype of q."""
        return FORMATS.get(self.stored)

    @property
    def seqlens(self) -> tuple[int, ...]:
        """The keys of each entry after the call."""
        return tuple(self.attention.mask.seqlens_k or ())

    @property
    def before(self) -> tuple[int, ...]:
        """The keys of each entry before the call."""
        return tuple(length - self.new for length in self.seqlens)

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of out and lse: there are no gradients."""
        of_attention = self.attention.elements
        return {"out": of_attention["out"], "lse": of_attention["lse"]}

    def record(self) -> dict[str, Any]:
        """Returns the record of the attention, and the other fields as "cache"."""
        fields = ("page_size", "new", "shared", "spare")
        cache: dict[str, Any] = {
            name: getattr(self, name) for name in fields if getattr(self, name)
        }
        if self.order != PAGE_ORDERS[0]:
            cache["order"] = self.order
        if self.format is not None:
            cache |= {"stored": self.stored, "scales": self.scales}
        if self.divides:
            cache["divides"] = True
        return self.attention.record() | {"cache": cache}

    @classmethod
    def from_record(cls, record: dict[str, object]) -> CacheProblem:
        """Reads the output of ``to_json`` after JSON parsing.

        Raises:
            ValueError: A field is unknown or has an invalid value.
        """
        fields = dict(record)
        cache = fields.pop("cache")
        try:
            return cls(attention=Problem.from_record(fields), **cache)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"problem is malformed: {error}") from None
