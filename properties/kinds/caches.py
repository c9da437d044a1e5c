"""Attention over a cache, contiguous or in pages: how calls are run, shrunk and described."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.caches import appended, gathered
from fa_verify.properties.execution.guard_bands import GuardBands
from fa_verify.properties.execution.trial import (
    Judged,
    PlannedRun,
    SubjectError,
    Trial,
    plan_run,
    run_kvcache,
)
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kinds import features as of_attention
from fa_verify.properties.kinds import reductions as simpler
from fa_verify.properties.kinds.feature import Feature, present
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.subjects.refusals import ExcludedCallError
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import ExcludedError
from fa_verify.properties.subjects.supported_caches import cached

__all__ = ["CACHE", "CacheTrial", "Result", "expected", "run_cache"]

# out, and lse if the kernel returns it.
Result = tuple[torch.Tensor, torch.Tensor | None]
_PLAIN = ("shared", "spare", "new", "page_size")
# Features of the attention that say nothing of a call with a cache: it has lengths and no gradient.
_NOT_OF_CACHES = ("padded keys", "dirty", "dout", "dlse", "M > N", "M < N")


@dataclass(frozen=True)
class CacheTrial(Trial):
    """A run of a call with a cache.

    Args:
        problem: The call.
        inputs: The tensors of its attention.
        called: The tensors of the call, whose caches the kernel may have written to.
        caches: The caches of keys and of values as the call has to leave them.
        got: Out and lse.
        planned: The results of the oracle and their bounds.
    """

    problem: CacheProblem
    inputs: Inputs
    called: CacheInputs
    caches: tuple[torch.Tensor, torch.Tensor]
    got: Result
    planned: PlannedRun

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """Out and lse, if the kernel returned them."""
        want, bound = self.planned.want, self.planned.judgement.bound
        return {
            name: Judged(got, getattr(want, name), getattr(bound, name))
            for name, got in zip(("out", "lse"), self.got, strict=True)
            if got is not None
        }


def run(subject: Subject, problem: CacheProblem) -> CacheTrial | None:
    """Run a call with a cache, and judge it by the attention to the keys that the cache holds.

    Returns:
        The trial; None if the attention is out of range.

    Raises:
        SubjectError: The kernel raises, changes another input, or an output has a wrong form.
        RefusedError: The kernel refuses the call, or its declarations exclude it.
    """
    if reason := excludes(subject, problem):
        raise ExcludedCallError(reason)
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs)
    caches = expected(x)
    got = run_cache(subject, problem, x)
    attention = problem.attention
    if not attention.mask.is_plain:
        # A predicate may depend on N: the places of an entry, with or without keys.
        attention = dataclasses.replace(attention, N=x.table.shape[1] * x.k_cache.shape[1])
    seqlens = torch.tensor(problem.seqlens)
    k, v = (gathered(cache, seqlens, x.table, attention.N) for cache in caches)
    judged = subject
    if subject.kvcache_splits is not None:
        # The splits of its calls with a cache.
        judged = subject.assuming({"splits": subject.kvcache_splits(problem.attention)})
    planned = plan_run(judged, attention, inputs._replace(k=k, v=v))
    if planned is None:
        return None
    return CacheTrial(subject, problem, inputs, x, caches, got, planned)


def run_cache(
    subject: Subject, problem: CacheProblem, x: CacheInputs, fill: float = math.nan
) -> Result:
    """Run a kernel with guard bands around what it allocates, which holds ``fill``.

    Raises:
        SubjectError: As ``run``.
        RefusedError: The kernel refuses the call.
    """
    with GuardBands(fill) as guards:
        found = run_kvcache(subject, problem.attention, x)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return found


def expected(x: CacheInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as a call has to leave them."""
    if x.k is None or x.v is None:
        return x.k_cache.clone(), x.v_cache.clone()
    return (
        appended(x.k_cache, x.k, x.cache_seqlens, x.table),
        appended(x.v_cache, x.v, x.cache_seqlens, x.table),
    )


def draw(
    subject: Subject, *, dtype: str, device: str, **wanted: Any
) -> st.SearchStrategy[CacheProblem]:
    """Return calls of a dtype that a kernel takes; ``wanted`` are arguments of ``cached``.

    Raises:
        ExcludedError: The kernel takes no such call.
    """
    if subject.kvcache is None:
        raise ExcludedError(f"{subject.name} declares no kvcache")
    mask = wanted.get("mask")
    if mask is not None and not subject.masks_caches:
        raise ExcludedError(f"{subject.name} takes no mask in a call with a cache")
    of_dtype = [
        name
        for name, declared in subject.configs.items()
        if dtype in declared.get("dtypes", subject.dtypes)
    ]
    if not of_dtype or device not in subject.devices:
        raise ExcludedError(
            f"{subject.name} declares dtypes={subject.dtypes} and devices={subject.devices}"
        )
    # A few configurations without splits.
    small = [name for name in ("16x16", "16x32", "32x16", "16x16-tf32") if name in of_dtype]
    configs = (small or of_dtype)[: None if mask is None else 1]
    return cached(subject, dtype, device, configs, **wanted)


def excludes(subject: Subject, problem: CacheProblem) -> str | None:
    """Return the declaration that excludes a call, as a sentence; None if none does."""
    attention = problem.attention
    if not attention.mask.is_plain and not subject.masks_caches:
        return f"{subject.name} takes no mask in a call with a cache"
    appends = problem.new > 0
    return subject.excludes_cache(attention, problem.page_size, appends=appends)


def complexity(problem: CacheProblem) -> tuple[float, ...]:
    """Return a sort key: that of the attention, and the fields of the cache that are not 0."""
    sizes, fields, *others = simpler.complexity(problem.attention)
    own = sum(getattr(problem, name) > 0 for name in _PLAIN)
    rows = problem.new + problem.shared + problem.spare + problem.page_size
    return sizes, fields + own, *others, rows


def reductions(problem: CacheProblem) -> Iterator[CacheProblem]:
    """Yield calls that are simpler in one field: a plainer cache, then a simpler attention."""
    changes: list[dict[str, Any]] = [
        *({name: 0} for name in _PLAIN),
        *({name: size} for name in _PLAIN for size in simpler.steps(getattr(problem, name))),
        *({"attention": _with_lengths(problem, x)} for x in simpler.reductions(problem.attention)),
    ]
    yield from _valid(problem, iter(changes))
    # All that a cache holds is the length of its longest entry.
    longest = max((*problem.seqlens, 1))
    if longest < problem.attention.N:
        yield from _valid(problem, iter([{"N": longest}]))


def _valid(problem: CacheProblem, changes: Iterator[dict[str, Any]]) -> Iterator[CacheProblem]:
    """Yield the valid calls that result from changes, without the call itself."""
    for change in changes:
        try:
            other = changed(problem, **change)
        except ValueError:
            continue
        if other != problem:
            yield other


def _with_lengths(problem: CacheProblem, attention: Problem) -> Problem:
    """Return an attention whose mask has lengths: those of the call, where it has none."""
    if attention.mask.seqlens_k is not None and attention.mask.seqlens_q is None:
        return attention
    lengths = attention.mask.seqlens_k or tuple(
        min(length, attention.N) for length in problem.seqlens[: attention.B]
    )
    mask = dataclasses.replace(attention.mask, seqlens_q=None, seqlens_k=lengths)
    return dataclasses.replace(attention, mask=mask)


def features(problem: CacheProblem) -> list[Feature]:
    """Return the features of a call: those of the cache, and of its attention."""
    found = [
        ("pages", problem.page_size > 0),
        ("appended keys", problem.new > 0),
        ("shared pages", problem.shared > 0),
    ]
    longest = max(problem.seqlens, default=0)
    rows = problem.page_size
    attention = [
        x
        for x in of_attention.features_of(problem.attention)
        if x.name not in _NOT_OF_CACHES and not x.name.startswith(("N ", "layout of "))
    ]
    return [
        *(Feature(name) for name, holds in found if holds),
        *attention,
        *([Feature("N above", longest - 1)] if longest > 1 else []),
        *([Feature("page_size above", rows - 1)] if rows > 1 else []),
        *([Feature("appended keys above", problem.new - 1)] if problem.new > 1 else []),
    ]


def holds(feature: Feature, problem: CacheProblem) -> bool:
    """Return whether a call has a feature."""
    return present(feature, problem, features)


def without(
    feature: Feature, problem: CacheProblem, configs: Iterable[str] = ()
) -> Iterator[CacheProblem]:
    """Yield calls without a feature that a call has, nearest first."""
    name, value = feature
    changes: list[dict[str, Any]]
    if name == "pages":
        changes = [{"page_size": 0, "shared": 0}]
    elif name == "appended keys":
        changes = [{"new": 0}]
    elif name == "shared pages":
        changes = [{"shared": 0}]
    elif name in ("page_size above", "appended keys above"):
        field = "page_size" if name.startswith("page") else "new"
        changes = [{field: value}, {field: value, "shared": 0}]
    elif name == "N above":
        assert isinstance(value, int)
        lengths = tuple(min(length, value) for length in problem.seqlens)
        mask = dataclasses.replace(problem.attention.mask, seqlens_k=lengths)
        changes = [
            {"mask": mask},
            {"mask": mask, "N": value, "shared": 0, "new": min((problem.new, *lengths))},
        ]
    else:
        changes = [
            {"attention": _with_lengths(problem, x)}
            for x in of_attention.without(feature, problem.attention, configs)
        ]
        if name == "empty rows":
            full = tuple(length or 1 for length in problem.seqlens)
            changes.append({"mask": Mask(seqlens_k=full)})
    for other in _valid(problem, iter(changes)):
        if not holds(feature, other):
            yield other


CACHE = Kind(draw, excludes, run, reductions, complexity, features, holds, without)
