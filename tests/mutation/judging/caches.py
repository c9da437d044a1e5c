"""Judges a mutant of the kernels by calls with a cache."""

from __future__ import annotations

from collections.abc import Iterator

from fa_verify.diagnosis.mutant import Kill, Mutant
from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.subjects.subject import Subject

__all__ = ["is_of_caches", "kills_by_caches"]

# Files whose mutants calls with a cache judge, before the steps.
_FILES = frozenset(
    f"fa_kernels/{name}.py"
    for name in (
        "kernels/portable/kvcache", "kernels/common/addressing", "launch/portable", "decoding",
    )
)  # fmt: skip
_ATTENTION = Problem(
    B=2, H=4, Hk=2, N=40, M=5, D=20, Dv=7, dtype="fp32", config="16x16", seed=3,
    mask=Mask(causal=True, window_left=20, seqlens_k=(37, 21)),
)  # fmt: skip
_PROBLEMS = (
    CacheProblem(attention=_ATTENTION, page_size=7, new=4, shared=2, spare=2),
    CacheProblem(attention=_ATTENTION, new=17, spare=2),
)


def is_of_caches(mutant: Mutant) -> bool:
    """Whether calls with a cache judge a mutant, by the files or by the guarantees that it names."""
    of_caches = any(name[0] == "C" and name[1:].isdigit() for name in mutant.caught_by)
    return of_caches or any(edit.file in _FILES for edit in mutant.edits)


def kills_by_caches(subject: Subject) -> Iterator[Kill]:
    """Yields the findings of calls with a cache, as checks of no step."""
    for problem in _PROBLEMS:
        for name, check in CACHES.items():
            try:
                found = found_in_cache(subject, problem, check)
            except NotImplementedError as error:
                yield Kill("raised", -1, str(error)[:500])
                continue
            for finding in found[:1]:
                yield Kill(f"cache {name}", -1, str(finding)[:500])
