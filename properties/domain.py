"""Problems inside what a subject declares, and why there are none."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from oracles.problem import LAYOUTS, Problem
from properties.strategies import HEAD_DIMS, problems
from properties.subject import Subject

__all__ = ["ExcludedError", "problems_of"]


class ExcludedError(ValueError):
    """What is wanted lies outside what a subject declares; the message says which declaration."""


def problems_of(
    subject: Subject,
    *,
    dtype: str,
    device: str,
    max_seqlen: int,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    layouts: tuple[str, ...] = LAYOUTS,
    padding: bool = False,
    hidden: bool = False,
    empty_rows: bool = False,
    **wanted: Any,
) -> st.SearchStrategy[Problem]:
    """``strategies.problems`` with everything that a subject declares.

    Args:
        subject: The subject.
        dtype: Of the inputs.
        device: "cpu" or "cuda".
        max_seqlen: Largest M and N; the declaration may say less.
        head_dims: Sizes of D and Dv; those that are declared are drawn, and where none of them is,
            the declared ones.
        layouts: Storage layouts; those that are declared are drawn.
        padding: See ``problems``.
        hidden: See ``problems``.
        empty_rows: See ``problems``.
        wanted: Further arguments of ``problems``.

    Raises:
        ExcludedError: No problem of this kind is declared as supported.
    """
    if dtype not in subject.dtypes:
        raise _excluded(subject, "dtypes")
    if device not in subject.devices:
        raise _excluded(subject, "devices")
    allowed = subject.layouts or LAYOUTS
    dims = subject.head_dims
    drawn: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "head_dims": _some(head_dims, dims) or dims,
        "layouts": _some(layouts, allowed) or allowed,
        "gqa": subject.gqa,
        "dv_ne_d": subject.dv_ne_d,
        "seqlen_multiple": subject.seqlen_multiple,
        # Two multiples at least, or there is nothing to be seen of several tiles.
        "max_seqlen": min(
            max(max_seqlen, 2 * subject.seqlen_multiple), subject.max_seqlen or max_seqlen
        ),
        **wanted,
    }
    positions = tuple(kind for kind in subject.masks if kind != "padding")
    lengths = ("padding",) if "padding" in subject.masks else ()
    if padding and not lengths:
        raise _excluded(subject, "masks")
    if hidden and not positions:
        raise _excluded(subject, "masks")
    if empty_rows and not lengths and not subject.m_ne_n:
        raise _excluded(subject, "m_ne_n")
    forced: dict[str, Any] = {"padding": padding, "hidden": hidden, "empty_rows": empty_rows}
    if subject.causal_alignment == "bottom-right" or not positions:
        masks = ("full", *positions, *lengths)
        return problems(**drawn, **forced, masks=masks, m_ne_n=subject.m_ne_n)
    # The alignments agree where M = N and nothing is padded: positional masks are drawn there, and
    # everything else without them.
    apart = []
    if not padding and not empty_rows:
        apart.append(problems(**drawn, **forced, masks=positions, m_ne_n=False))
    if not hidden:
        masks = ("full", *lengths)
        apart.append(problems(**drawn, **forced, masks=masks, m_ne_n=subject.m_ne_n))
    if not apart:
        raise _excluded(subject, "causal_alignment")
    return st.one_of(apart)


def _some(wanted: tuple[Any, ...], declared: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """What is wanted and declared, in the order of the wanted."""
    return tuple(item for item in wanted if declared is None or item in declared)


def _excluded(subject: Subject, word: str) -> ExcludedError:
    return ExcludedError(f"{subject.name} declares {word}={getattr(subject, word)!r}")
