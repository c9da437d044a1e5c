"""Draw calls with a cache, or merges of states, and check each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from fa_verify.conformance.conftest import seed_of_kernels
from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.checks.merging import MergeFinding
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported_caches import cached
from fa_verify.simulator.interpreter.dot_order import dots_in_order

__all__ = ["hold", "holds_for_drawn"]


def hold(
    subject: Subject,
    strategy: st.SearchStrategy[Any],
    findings_of: Callable[[Any], Sequence[object]],
) -> None:
    """Draw problems, and fail with the findings of a check on the smallest.

    It skips the test if the subject refuses all problems.

    Args:
        subject: The subject.
        strategy: The problems.
        findings_of: Returns the findings of a problem; NotImplementedError is a refusal.
    """
    __tracebackhide__ = True
    judged, refused = [], []

    @hypothesis.settings()
    @hypothesis.given(strategy)
    def holds(drawn: Any) -> None:
        __tracebackhide__ = True
        try:
            findings = findings_of(drawn)
        except NotImplementedError as reason:
            refused.append(str(reason))
            return
        judged.append(drawn)
        if findings:
            pytest.fail("\n".join(map(str, findings)), pytrace=False)

    holds()
    if not judged:
        pytest.skip(f"{subject.name} refused every problem: {refused[:1]}")


def _configs_of(subject: Subject, dtype: str) -> tuple[str, ...]:
    """Return the names of a few configurations without splits that take a dtype."""
    of_dtype = [
        name
        for name, declared in subject.configs.items()
        if dtype in declared.get("dtypes", subject.dtypes)
    ]
    small = [name for name in ("16x16", "16x32", "32x16", "16x16-tf32") if name in of_dtype]
    return tuple(small or of_dtype[:1])


def holds_for_drawn(
    subject: Subject,
    device: str,
    check: str,
    dtype: str,
    mask: type[Mask] | None = None,
    mask_source: str = "",
) -> None:
    """Draw problems, with masks of a class if one is given, and fail where a check finds something.

    It skips the test if the subject declares that it takes no such call, or refuses all of them.

    Args:
        subject: The subject.
        device: "cpu" or "cuda".
        check: A name in ``CACHES``.
        dtype: The dtype of the problems.
        mask: The class of their masks; None draws windows.
        mask_source: The value of --fa-mask.
    """
    __tracebackhide__ = True
    if subject.kvcache is None:
        pytest.skip(f"{subject.name} declares no kvcache")
    if dtype not in subject.dtypes:
        pytest.skip(f"{subject.name} declares dtypes={subject.dtypes}")
    if mask is not None and not subject.masks_caches:
        pytest.skip(f"{subject.name} takes no mask in a call with a cache")
    configs = _configs_of(subject, dtype)[: None if mask is None else 1]
    # All checks of a dtype share their kernels.
    kernels = seed_of_kernels(device, f"caches of {dtype}")

    def findings_of(problem: CacheProblem) -> list[MergeFinding]:
        # In the interpreter, a product's bits else depend on its row in the tile.
        with dots_in_order():
            found = found_in_cache(subject, problem, CACHES[check])
        return [dataclasses.replace(x, mask=mask_source) for x in found]

    hold(subject, cached(subject, dtype, device, configs, mask, kernels), findings_of)
