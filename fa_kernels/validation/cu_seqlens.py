"""Validation of ``cu_seqlens_*`` and ``max_seqlen_*`` of varlen calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = ["check_entries", "check_has_lengths", "check_lengths", "checked_offsets"]


def _lengths(offsets: Sequence[int]) -> tuple[int, ...]:
    """Returns the length of each sequence."""
    return tuple(end - start for start, end in pairwise(offsets))


def checked_offsets(
    of: str, offsets: object, longest: object, x: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[int, ...] | None, int]:
    """Returns cu_seqlens as int32 (B + 1,) on the device or as ints, and the longest length.

    Args:
        of: "q" or "k".
        offsets: ``cu_seqlens_*`` as given.
        longest: ``max_seqlen_*`` as given.
        x: The tensor (1, heads, rows, head_dim) that holds the sequences.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """
    name, rows = f"cu_seqlens_{of}", x.shape[2]
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, int):
            raise TypeError(f"max_seqlen_{of} is {longest!r}; needs an int or None")
        if longest < 0:
            raise ValueError(f"max_seqlen_{of} is {longest}; needs an int >= 0")
    if isinstance(offsets, torch.Tensor):
        if offsets.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {offsets.dtype}; needs torch.int32")
        if offsets.ndim != 1 or offsets.shape[0] == 0:
            raise ValueError(f"{name} has shape {tuple(offsets.shape)}; needs (B + 1,)")
        if offsets.device != x.device:
            raise ValueError(f"{name} is on {offsets.device}; needs the device of q, {x.device}")
        return offsets.contiguous(), None, rows if longest is None else min(longest, rows)
    if not isinstance(offsets, Sequence) or isinstance(offsets, str | bytes):
        raise TypeError(f"{name} is {offsets!r}; needs a sequence of ints or an int32 tensor")
    if not offsets:
        raise ValueError(f"{name} is empty; needs B + 1 offsets")
    for offset in offsets:
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"{name} holds {offset!r}; needs ints")
        if not 0 <= offset <= rows:
            raise ValueError(f"{name} holds {offset}; needs offsets in [0, {rows}]")
    lengths = _lengths(offsets)
    if any(length < 0 for length in lengths):
        raise ValueError(f"{name} is {tuple(offsets)}; needs ascending offsets")
    found = max((0, *lengths))
    if longest is not None and longest < found:
        raise ValueError(f"max_seqlen_{of} is {longest}; needs at least {found}, the longest")
    return None, tuple(offsets), found


def check_entries(of_q: Sequence[int] | torch.Tensor, of_k: Sequence[int] | torch.Tensor) -> None:
    """Checks that queries and keys have the same number of sequences.

    Raises:
        ValueError: They have not.
    """
    if len(of_k) != len(of_q):
        raise ValueError(
            f"cu_seqlens_k has {len(of_k)} offsets; needs as many as cu_seqlens_q, {len(of_q)}"
        )


def check_lengths(of: str, lengths: Sequence[int] | None, offsets: Sequence[int] | None) -> None:
    """Checks that the lengths of a mask, if it has any, agree with cu_seqlens.

    Raises:
        ValueError: They differ, or cu_seqlens is a tensor: reading it would synchronise.
    """
    if lengths is None:
        return
    if offsets is None:
        raise ValueError(
            f"mask has seqlens_{of}, and cu_seqlens_{of} is a tensor; needs ints, to compare them"
        )
    if tuple(lengths) != _lengths(offsets):
        raise ValueError(
            f"mask has seqlens_{of} {tuple(lengths)}; needs those of cu_seqlens_{of}, "
            f"{_lengths(offsets)}"
        )


def check_has_lengths(mask: Any) -> None:
    """Checks that a mask with a predicate has lengths; a predicate may depend on them.

    Raises:
        ValueError: It has none.
    """
    for of in ("q", "k"):
        if getattr(mask, f"seqlens_{of}") is None:
            raise ValueError(
                f"mask has a predicate and no seqlens_{of}; needs those of cu_seqlens_{of}, given "
                "as ints"
            )
