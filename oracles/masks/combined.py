"""Masks made of masks: both, either, and one seen from other batch entries and heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fa_verify.oracles.masks.mask import Mask

if TYPE_CHECKING:
    import torch

__all__ = ["Both", "Either", "Taken"]

_Lengths = tuple[int, ...] | None


def _with_lengths(mask: Mask, seqlens_q: _Lengths, seqlens_k: _Lengths) -> Mask:
    return dataclasses.replace(mask, seqlens_q=seqlens_q, seqlens_k=seqlens_k)


def _check_mask(name: str, given: object) -> None:
    if not isinstance(given, Mask):
        raise TypeError(f"{name} is {given!r}; needs a Mask")


@dataclass(frozen=True, kw_only=True)
class _Pair(Mask):
    """Two masks; what lengths they have become those of the pair.

    Args:
        first: A mask.
        second: Another.

    Raises:
        TypeError: One is no mask.
        ValueError: Their lengths differ.
    """

    first: Mask = field(default_factory=Mask)
    second: Mask = field(default_factory=Mask)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first", "second"):
            _check_mask(name, getattr(self, name))
        for name in ("seqlens_q", "seqlens_k"):
            given = {getattr(x, name) for x in (self, self.first, self.second)} - {None}
            if len(given) > 1:
                raise ValueError(f"{name} of combined masks are {sorted(given)}; needs the same")
            object.__setattr__(self, name, given.pop() if given else None)
        for name in ("first", "second"):
            object.__setattr__(self, name, _with_lengths(getattr(self, name), None, None))
        # Not a field: an instance is as uniform as its parts.
        object.__setattr__(self, "uniform", self.first.uniform and self.second.uniform)

    def _parts(self) -> tuple[Mask, Mask]:
        """The two masks at the pair's lengths, from which positions follow."""
        lengths = self.seqlens_q, self.seqlens_k
        return _with_lengths(self.first, *lengths), _with_lengths(self.second, *lengths)


@dataclass(frozen=True, kw_only=True)
class Both(_Pair):
    """Visible where both masks say so."""

    def allows(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Both."""
        first, second = (part.permits(b, h, m, n, M=M, N=N) for part in self._parts())
        return first & second

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """Both."""
        from fa_verify.oracles.masks.triton_predicates import both, native_of

        first, second = (native_of(part, B, H, M, N, device) for part in self._parts())
        return both(first[0], second[0]), (first[1], second[1])


@dataclass(frozen=True, kw_only=True)
class Either(_Pair):
    """Visible where one of two masks says so."""

    def allows(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Either."""
        first, second = (part.permits(b, h, m, n, M=M, N=N) for part in self._parts())
        return first | second

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """Either."""
        from fa_verify.oracles.masks.triton_predicates import either, native_of

        first, second = (native_of(part, B, H, M, N, device) for part in self._parts())
        return either(first[0], second[0]), (first[1], second[1])


@dataclass(frozen=True, kw_only=True)
class Taken(Mask):
    """A mask seen from other batch entries and heads: b is its ``entries[b]``, h its ``heads[h]``.

    Args:
        mask: The mask; its lengths do not count.
        entries: A batch entry of it for each of this one, all different.
        heads: A query head of it for each of this one; None leaves heads as they are.

    Raises:
        TypeError: A field is of the wrong type.
        ValueError: An entry comes twice, or entries and lengths differ in number.
    """

    mask: Mask = field(default_factory=Mask)
    entries: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_mask("mask", self.mask)
        for name in ("entries", "heads"):
            given = getattr(self, name)
            if given is None and name == "heads":
                continue
            if not isinstance(given, tuple | list) or not all(
                type(x) is int and x >= 0 for x in given
            ):
                raise TypeError(f"{name} is {given!r}; needs ints >= 0")
            object.__setattr__(self, name, tuple(given))
        if len(set(self.entries)) < len(self.entries):
            raise ValueError(f"entries is {self.entries}; needs different batch entries")
        object.__setattr__(self, "mask", _with_lengths(self.mask, None, None))

    def lengths(self, B: int, M: int, N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As of ``Mask``."""
        if len(self.entries) != B:
            raise ValueError(f"entries has {len(self.entries)}; needs one per batch entry, {B}")
        return super().lengths(B, M, N)

    def allows(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """What the mask says of the entry and the head that these stand for."""
        head = h if self.heads is None else _looked_up(self.heads, h)
        return self._whole().permits(_looked_up(self.entries, b), head, m, n, M=M, N=N)

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """The mask's own, behind two tables."""
        import torch

        from fa_verify.oracles.masks.triton_predicates import native_of, taken

        heads = tuple(range(H)) if self.heads is None else self.heads
        count = 1 + max(self.entries, default=-1), 1 + max(heads, default=-1)
        function, args = native_of(self._whole(), *count, M, N, device)
        tables = (torch.tensor(x, dtype=torch.int32, device=device) for x in (self.entries, heads))
        return taken(function), (*tables, args)

    def taken(self, entries: tuple[int, ...], heads: tuple[int, ...] | None = None) -> Mask:
        """As of ``Mask``, of the same mask."""
        rows, keys = self._lengths_of(entries)
        both = self.heads if heads is None else heads
        if heads is not None and self.heads is not None:
            both = tuple(self.heads[h] for h in heads)
        return dataclasses.replace(
            self, entries=tuple(self.entries[b] for b in entries), heads=both,
            seqlens_q=rows, seqlens_k=keys,
        )  # fmt: skip

    def _whole(self) -> Mask:
        """The mask with these lengths at its own entries; other entries are empty."""
        spread = []
        for lengths in (self.seqlens_q, self.seqlens_k):
            of_entry = dict(zip(self.entries, lengths or (), strict=False))
            count = range(1 + max(self.entries, default=-1))
            spread.append(None if lengths is None else tuple(of_entry.get(b, 0) for b in count))
        return _with_lengths(self.mask, *spread)


def _looked_up(table: tuple[int, ...], at: Any) -> Any:
    """table[at] for an int or a tensor."""
    if isinstance(at, int):
        return table[at]
    import torch

    return torch.tensor(table, device=at.device)[at]
