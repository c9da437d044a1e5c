"""What a mask means: a frozen description and the one predicate that defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Mask"]


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
    """Which keys each query sees: causal, sliding window and padding lengths.

    A row m of batch entry b stands at position p = m + seqlens_k[b] - seqlens_q[b] (bottom-right
    alignment) and sees the keys n with p - window_left <= n <= p + window_right, both ends
    inclusive, as far as they exist::

        seqlen_q = 3, seqlen_k = 5, causal      seqlen_q = 5, seqlen_k = 3, causal

            n 0 1 2 3 4                             n 0 1 2
        m 0   x x x . .                         m 0   . . .     (no visible key)
          1   x x x x .                           1   . . .
          2   x x x x x                           2   x . .
                                                  3   x x .
                                                  4   x x x

    Args:
        causal: Nothing after the own position; the same as ``window_right=0``.
        window_left: Keys visible before the own position; None is unbounded.
        window_right: Keys visible after the own position; None is unbounded.
        seqlens_q: Valid query rows of each batch entry, B ints in [0, M]; None is M for all.
        seqlens_k: Valid keys of each batch entry, B ints in [0, N]; None is N for all.

    Raises:
        TypeError: A field is of the wrong type.
        ValueError: A bound or length is negative, or causal contradicts window_right.

    Source: the alignment and the window of flash_attn 2.1 and later.
    """

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None

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

    @property
    def right(self) -> int | None:
        """The effective right bound of the window: 0 if causal."""
        return 0 if self.causal else self.window_right

    def lengths(self, B: int, M: int, N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (seqlens_q, seqlens_k) with the defaults filled in.

        Raises:
            ValueError: There are not B lengths, or one lies past M or N.
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

    def visible(self, b: int, h: int, m: int, n: int, *, M: int, N: int) -> bool:
        """The definition: whether query m of head h sees key n, in batch entry b.

        Every other form of a mask (dense, tile ranges, element masks of kernels) is compared with
        this one. ``h`` does not matter for this class; predicates of other masks may use it.
        """
        seqlen_q = M if self.seqlens_q is None else self.seqlens_q[b]
        seqlen_k = N if self.seqlens_k is None else self.seqlens_k[b]
        if m >= seqlen_q or n >= seqlen_k:
            return False
        position = m + seqlen_k - seqlen_q
        if self.window_left is not None and n < position - self.window_left:
            return False
        return self.right is None or n <= position + self.right

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """The mask as a bool tensor (B or 1, H or 1, M, N), True where visible."""
        import torch

        seqlens_q, seqlens_k = self.lengths(B, M, N)
        same = len(set(seqlens_q)) <= 1 and len(set(seqlens_k)) <= 1
        if same:
            seqlens_q, seqlens_k = seqlens_q[:1], seqlens_k[:1]
        rows = torch.tensor(seqlens_q, dtype=torch.int64, device=device).view(-1, 1, 1, 1)
        keys = torch.tensor(seqlens_k, dtype=torch.int64, device=device).view(-1, 1, 1, 1)
        m = torch.arange(M, device=device).view(1, 1, M, 1)
        n = torch.arange(N, device=device).view(1, 1, 1, N)
        distance = n - (m + keys - rows)
        seen = (m < rows) & (n < keys)
        if self.window_left is not None:
            seen = seen & (distance >= -self.window_left)
        if self.right is not None:
            seen = seen & (distance <= self.right)
        return seen
