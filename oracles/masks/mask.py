"""The algebra of masks: ``Mask``, ``Both``, ``Either``, and ``Sliced`` entries and heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fa_verify.oracles.renamed import SPELLINGS

if TYPE_CHECKING:
    import torch

__all__ = ["Between", "Both", "Either", "Mask", "Sliced", "shown"]


@dataclass(frozen=True)
class Between:
    """Bounds of a mask's int, both inclusive: ``width: Annotated[int, Between(1, 64)] = 1``."""

    low: int
    high: int


def _checked_lengths(name: str, lengths: object) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    if not isinstance(lengths, tuple | list):
        raise TypeError(f"{name} is {lengths!r}; needs None or a sequence of ints")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"{name} holds {length!r}; needs ints")
        if length < 0:
            raise ValueError(f"{name} holds {length}; needs lengths >= 0")
    return tuple(lengths)


def _check_window(name: str, bound: object) -> None:
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise TypeError(f"{name} is {bound!r}; needs None or an int")
    if bound < 0:
        raise ValueError(f"{name} is {bound}; needs None or an int >= 0")


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The keys that each query sees: causal, sliding window and padding lengths.

    Row m of batch entry b has position p = m + seqlens_k[b] - seqlens_q[b] (bottom-right
    alignment). It sees the valid keys n with p - window_left <= n <= p + window_right, inclusive::

        seqlen_q = 3, seqlen_k = 5, causal      seqlen_q = 5, seqlen_k = 3, causal

            n 0 1 2 3 4                             n 0 1 2
        m 0   x x x . .                         m 0   . . .     (no visible key)
          1   x x x x .                           1   . . .
          2   x x x x x                           2   x . .
                                                  3   x x .
                                                  4   x x x

    Args:
        causal: Hides keys after a query's position; the same as ``window_right=0``.
        window_left: Keys visible before a query's position; None is unbounded.
        window_right: Keys visible after a query's position; None is unbounded.
        seqlens_q: Valid query rows of each batch entry, B ints in [0, M]; None is M for all.
        seqlens_k: Valid keys of each batch entry, B ints in [0, N]; None is N for all.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A bound or length is negative, or causal contradicts window_right.

    A subclass adds fields and overrides ``mask_mod``, which window and lengths are combined with.
    It also overrides ``native`` for kernels that evaluate masks themselves. The class argument
    ``uniform=True`` declares that ``mask_mod`` does not depend on b and h. ``a & b`` and ``a | b``
    combine masks.

    Masks of one class are equal if their fields are. A subclass that holds tensors declares
    ``@dataclass(frozen=True, kw_only=True, eq=False)``: its masks are equal to themselves alone.

    Source: the alignment and the window of flash_attn 2.1 and later.
    """

    uniform: ClassVar[bool] = True

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None

    def __init_subclass__(cls, *, uniform: bool = False, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.uniform = uniform
        for old, new in SPELLINGS["Mask"].items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__} defines {old}; the method is called {new}")

    def _check_at_least_one(self, *names: str) -> None:
        """Checks that fields of a subclass are ints >= 1.

        Raises:
            TypeError: A field is no int.
            ValueError: A field is less than 1.
        """
        for name in names:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} is {size!r}; needs an int")
            if size < 1:
                raise ValueError(f"{name} is {size}; needs an int >= 1")

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal is {self.causal!r}; needs a bool")
        _check_window("window_left", self.window_left)
        _check_window("window_right", self.window_right)
        if self.causal and self.window_right not in (None, 0):
            raise ValueError(
                f"causal=True contradicts window_right={self.window_right}; "
                "causal means window_right=0: leave one of them out"
            )
        for name in ("seqlens_q", "seqlens_k"):
            object.__setattr__(self, name, _checked_lengths(name, getattr(self, name)))

    def __eq__(self, other: object) -> bool:
        """Whether two masks have the same class, window and lengths.

        A mask of a subclass that inherits this method and holds more is equal to itself alone.
        Caches of kernels would else give it the tables of another mask.
        """
        if not isinstance(other, Mask) or other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or (self._is_of_lengths and self._values() == other._values())

    def __hash__(self) -> int:
        """Hash in agreement with ``==``."""
        if not self._is_of_lengths:
            return object.__hash__(self)
        return hash((self.__class__, *self._values()))

    def _values(self) -> tuple[object, ...]:
        """The values of the fields of ``Mask``."""
        return tuple(getattr(self, name) for name in sorted(_FIELDS))

    @property
    def _is_of_lengths(self) -> bool:
        """Whether the mask holds nothing but the fields of ``Mask``."""
        named = {x.name for x in dataclasses.fields(self)}
        return named == _FIELDS and vars(self).keys() <= named

    @property
    def right(self) -> int | None:
        """The effective right bound of the window: 0 if causal."""
        return 0 if self.causal else self.window_right

    def lengths(self, B: int, M: int, N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (seqlens_q, seqlens_k) with the defaults filled in.

        Raises:
            ValueError: There are not B lengths, or one exceeds M or N.
        """
        filled = []
        for name, given, size in (
            ("seqlens_q", self.seqlens_q, M),
            ("seqlens_k", self.seqlens_k, N),
        ):
            lengths = (size,) * B if given is None else given
            if len(lengths) != B:
                raise ValueError(
                    f"{name} has {len(lengths)} lengths; needs one per batch entry, {B}"
                )
            if any(length > size for length in lengths):
                raise ValueError(f"{name} is {lengths}; needs lengths <= {size}")
            filled.append(lengths)
        return filled[0], filled[1]

    @property
    def is_plain(self) -> bool:
        """Whether lengths and window describe the mask completely."""
        return type(self).mask_mod is Mask.mask_mod

    def mask_mod(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Whether query m of head h may see key n in batch entry b, apart from window and lengths.

        Subclasses override it with an elementwise expression of integers. b, h, m and n are ints,
        or int64 tensors that broadcast against each other.

        Args:
            b: Batch entry.
            h: Query head.
            m: Valid query row; ``position`` aligns it with the keys.
            n: Valid key.
            M: Query rows of the tensors, including padding.
            N: Keys of the tensors, including padding.

        Returns:
            A bool, or a bool tensor of the broadcast shape or one that broadcasts to it.
        """
        return True

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """Returns ``mask_mod`` for kernels: (jit function of (b, h, m, n, args), args), or None.

        The ``triton.jit`` function gets scalars b and h, and valid rows m and keys n that broadcast
        against each other. args holds ints, tensors on the device and tuples of these. None means
        that ``mask_mod`` hides nothing.

        Raises:
            NotImplementedError: The mask has no Triton predicate.
        """
        if self.is_plain:
            return None
        raise NotImplementedError(f"{type(self).__name__} has no native predicate")

    def position(self, b: Any, m: Any, *, M: int, N: int) -> Any:
        """Returns the position of row m, m + seqlens_k[b] - seqlens_q[b]; may be negative."""
        if self.seqlens_q is None and self.seqlens_k is None:
            return m + (N - M)
        if isinstance(b, int):
            rows, keys = (x and x[b] for x in (self.seqlens_q, self.seqlens_k))
            return m + (N if keys is None else keys) - (M if rows is None else rows)
        return m + self.offsets(len(self.seqlens_q or self.seqlens_k or ()), M, N, b.device)[b]

    def offsets(self, B: int, M: int, N: int, device: torch.device | str) -> torch.Tensor:
        """Returns seqlens_k - seqlens_q, int32 (B,), which ``position`` adds to a row."""
        import torch

        rows, keys = self.lengths(B, M, N)
        apart = [key - row for row, key in zip(rows, keys, strict=True)]
        return torch.tensor(apart, dtype=torch.int32, device=device)

    def window_and_mask_mod(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Combines window and ``mask_mod``, elementwise, for valid rows and keys."""
        seen = self.mask_mod(b, h, m, n, M=M, N=N)
        if self.window_left is None and self.right is None:
            return seen
        distance = n - self.position(b, m, M=M, N=N)
        if self.window_left is not None:
            seen = (distance >= -self.window_left) & seen
        if self.right is not None:
            seen = (distance <= self.right) & seen
        return seen

    def is_visible(self, b: int, h: int, m: int, n: int, *, M: int, N: int) -> bool:
        """Whether query m of head h sees key n in batch entry b: the definition of the mask.

        Tests compare every other form (dense, tile ranges, element masks of kernels) with it.
        """
        seqlen_q = M if self.seqlens_q is None else self.seqlens_q[b]
        seqlen_k = N if self.seqlens_k is None else self.seqlens_k[b]
        if m >= seqlen_q or n >= seqlen_k:
            return False
        position = m + seqlen_k - seqlen_q
        if self.window_left is not None and n < position - self.window_left:
            return False
        if self.right is not None and n > position + self.right:
            return False
        return bool(self.mask_mod(b, h, m, n, M=M, N=N))

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Returns the mask as a bool tensor (B or 1, H or 1, M, N), True where visible."""
        import torch

        seqlens_q, seqlens_k = self.lengths(B, M, N)
        same = self.uniform and len(set(seqlens_q)) <= 1 and len(set(seqlens_k)) <= 1
        if same:
            seqlens_q, seqlens_k = seqlens_q[:1], seqlens_k[:1]
        rows = torch.tensor(seqlens_q, dtype=torch.int64, device=device).view(-1, 1, 1, 1)
        keys = torch.tensor(seqlens_k, dtype=torch.int64, device=device).view(-1, 1, 1, 1)
        h = torch.arange(1 if self.uniform else H, device=device).view(1, -1, 1, 1)
        m = torch.arange(M, device=device).view(1, 1, M, 1)
        n = torch.arange(N, device=device).view(1, 1, 1, N)
        seen = (m < rows) & (n < keys)
        seen = seen.expand(-1, h.shape[1], -1, -1).clone()
        # ``mask_mod`` never gets a padding row or key, so it can index tables with them.
        b = ((rows > 0) & (keys > 0)).flatten().nonzero()
        if b.numel():
            m, n = torch.minimum(m, rows - 1)[b[:, 0]], torch.minimum(n, keys - 1)[b[:, 0]]
            seen[b[:, 0]] &= self.window_and_mask_mod(b.view(-1, 1, 1, 1), h, m, n, M=M, N=N)
        return seen

    def sliced(self, entries: tuple[int, ...], heads: tuple[int, ...] | None = None) -> Mask:
        """Returns the mask of some batch entries and query heads, in order; None is all heads."""
        rows, keys = self._lengths_of(entries)
        if self.uniform:
            return dataclasses.replace(self, seqlens_q=rows, seqlens_k=keys)
        return Sliced(mask=self, entries=entries, heads=heads, seqlens_q=rows, seqlens_k=keys)

    def _lengths_of(
        self, entries: tuple[int, ...]
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Returns (seqlens_q, seqlens_k) of some batch entries."""
        rows, keys = (
            None if x is None else tuple(x[b] for b in entries)
            for x in (self.seqlens_q, self.seqlens_k)
        )
        return rows, keys

    def __and__(self, other: Mask) -> Mask:
        """Visible where both masks are; lengths that both define must agree."""
        return Both(first=self, second=other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        """Visible where at least one mask is; lengths as in ``&``."""
        return Either(first=self, second=other) if isinstance(other, Mask) else NotImplemented


_FIELDS = {x.name for x in dataclasses.fields(Mask)}
_Lengths = tuple[int, ...] | None


def _with_lengths(mask: Mask, seqlens_q: _Lengths, seqlens_k: _Lengths) -> Mask:
    return dataclasses.replace(mask, seqlens_q=seqlens_q, seqlens_k=seqlens_k)


def _check_mask(name: str, given: object) -> None:
    if not isinstance(given, Mask):
        raise TypeError(f"{name} is {given!r}; needs a Mask")


@dataclass(frozen=True, kw_only=True)
class _Pair(Mask):
    """Two masks; their lengths become the lengths of the pair.

    Args:
        first: The first mask.
        second: The second mask.

    Raises:
        TypeError: A field is no mask.
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
        # Not a field: an instance is uniform if both parts are.
        object.__setattr__(self, "uniform", self.first.uniform and self.second.uniform)

    def _parts(self) -> tuple[Mask, Mask]:
        """Returns the two masks with the lengths of the pair, which positions depend on."""
        lengths = self.seqlens_q, self.seqlens_k
        return _with_lengths(self.first, *lengths), _with_lengths(self.second, *lengths)


@dataclass(frozen=True, kw_only=True)
class Both(_Pair):
    """The conjunction of two masks."""

    def mask_mod(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Whether both masks allow the pair."""
        parts = self._parts()
        first, second = (part.window_and_mask_mod(b, h, m, n, M=M, N=N) for part in parts)
        return first & second

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """``mask_mod`` in Triton."""
        from fa_verify.oracles.masks.triton_predicates import both, native_of

        first, second = (native_of(part, B, H, M, N, device) for part in self._parts())
        return both(first[0], second[0]), (first[1], second[1])


@dataclass(frozen=True, kw_only=True)
class Either(_Pair):
    """The disjunction of two masks."""

    def mask_mod(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Whether at least one mask allows the pair."""
        parts = self._parts()
        first, second = (part.window_and_mask_mod(b, h, m, n, M=M, N=N) for part in parts)
        return first | second

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """``mask_mod`` in Triton."""
        from fa_verify.oracles.masks.triton_predicates import either, native_of

        first, second = (native_of(part, B, H, M, N, device) for part in self._parts())
        return either(first[0], second[0]), (first[1], second[1])


@dataclass(frozen=True, kw_only=True)
class Sliced(Mask):
    """Some batch entries and heads of a mask: b is its ``entries[b]``, h its ``heads[h]``.

    Args:
        mask: The mask; its lengths are ignored.
        entries: The mask's batch entry for each batch entry, all different.
        heads: The mask's query head for each query head; None keeps the heads.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: An entry is repeated, or entries and lengths differ in number.
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
        """As in ``Mask``; raises ValueError too if there are not B entries."""
        if len(self.entries) != B:
            raise ValueError(
                f"entries has {len(self.entries)} ints; needs one per batch entry, {B}"
            )
        return super().lengths(B, M, N)

    def mask_mod(self, b: Any, h: Any, m: Any, n: Any, *, M: int, N: int) -> Any:
        """Evaluates the mask at ``entries[b]`` and ``heads[h]``."""
        head = h if self.heads is None else _looked_up(self.heads, h)
        return self._whole().window_and_mask_mod(_looked_up(self.entries, b), head, m, n, M=M, N=N)

    def native(
        self, B: int, H: int, M: int, N: int, device: torch.device | str
    ) -> tuple[Any, tuple[Any, ...]]:
        """The mask's Triton predicate, with entries and heads looked up in two tables."""
        import torch

        from fa_verify.oracles.masks.triton_predicates import native_of, sliced

        heads = tuple(range(H)) if self.heads is None else self.heads
        count = 1 + max(self.entries, default=-1), 1 + max(heads, default=-1)
        function, args = native_of(self._whole(), *count, M, N, device)
        tables = (torch.tensor(x, dtype=torch.int32, device=device) for x in (self.entries, heads))
        return sliced(function), (*tables, args)

    def sliced(self, entries: tuple[int, ...], heads: tuple[int, ...] | None = None) -> Mask:
        """As in ``Mask``; the result slices the same mask, without nesting."""
        rows, keys = self._lengths_of(entries)
        both = self.heads if heads is None else heads
        if heads is not None and self.heads is not None:
            both = tuple(self.heads[h] for h in heads)
        return dataclasses.replace(
            self, entries=tuple(self.entries[b] for b in entries), heads=both,
            seqlens_q=rows, seqlens_k=keys,
        )  # fmt: skip

    def _whole(self) -> Mask:
        """Returns the mask with the lengths moved to its own entries; other entries are empty."""
        spread = []
        for lengths in (self.seqlens_q, self.seqlens_k):
            of_entry = dict(zip(self.entries, lengths or (), strict=False))
            count = range(1 + max(self.entries, default=-1))
            spread.append(None if lengths is None else tuple(of_entry.get(b, 0) for b in count))
        return _with_lengths(self.mask, *spread)


def _looked_up(table: tuple[int, ...], at: Any) -> Any:
    """Returns table[at] for an int or a tensor ``at``."""
    if isinstance(at, int):
        return table[at]
    import torch

    return torch.tensor(table, device=at.device)[at]


def shown(mask: Mask) -> str:
    """Returns the class of a mask and its fields that are not at their defaults."""
    fields = []
    for item in dataclasses.fields(mask):
        value = getattr(mask, item.name)
        if value != item.default:
            fields.append(f"{item.name}={shown(value) if isinstance(value, Mask) else repr(value)}")
    return f"{type(mask).__name__}({', '.join(fields)})"
