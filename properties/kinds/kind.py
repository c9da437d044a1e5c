"""The record of functions that a kind of call consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from fa_verify.oracles.call import Call
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.running.trial import Trial

__all__ = ["Kind"]


class Kind(NamedTuple):
    """A kind of call.

    Attributes:
        draw: Returns a strategy of calls inside the domain that a kernel declares. Takes the
            kernel, ``dtype``, ``device``, and the needs of a claim. Raises ``ExcludedError``.
        excludes: Returns the declaration that excludes a call, as a sentence; None if none does.
        run: Runs a call on a kernel, and the oracle; None if it is out of range, so that a correct
            kernel may fail. Raises ``SubjectError``, and NotImplementedError for a refusal.
        reductions: Yields calls that are simpler in one field, largest steps first.
        complexity: Returns a sort key, which decreases in each of the reductions.
        features: Returns the features that a failure may need, first those that kernels treat
            apart.
        holds: Returns whether a call has a feature.
        without: Yields calls without a feature that a call has, nearest first. Takes the names of
            the kernel's tile configurations.
    """

    draw: Callable[..., st.SearchStrategy[Any]]
    excludes: Callable[[Subject, Any], str | None]
    run: Callable[[Subject, Any], Trial | None]
    reductions: Callable[[Any], Iterator[Call]]
    complexity: Callable[[Any], tuple[float, ...]]
    features: Callable[[Any], list[Feature]]
    holds: Callable[[Feature, Any], bool]
    without: Callable[[Feature, Any, Iterable[str]], Iterator[Call]]
