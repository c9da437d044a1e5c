"""Judges a mutant of the kernels by calls with a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported_caches import hidden_first, lengthened
from fa_verify.simulator.interpreter.dot_order import dots_in_order
from tests.mutation.catalogue.mutant import Kill, Mutant
from tests.mutation.judging.merging import kills_of_call

__all__ = ["is_of_caches", "kills_by_caches"]

# Files whose mutants calls with a cache judge, before the steps.
_FILES = frozenset(
    f"fa_kernels/{name}.py"
    for name in (
        "kernels/portable/kvcache", "kernels/common/addressing", "launch/portable", "decoding",
    )
)  # fmt: skip
_ATTENTION = Problem(
    B=2, H=4, Hk=2, N=40, M=5, D=20, Dv=7, dtype="fp32", config="16x16", seed=3, sinks="ordinary",
    mask=Mask(causal=True, window_left=20, seqlens_k=(37, 21)),
)  # fmt: skip
# Several query tiles that are not square, and score modifications.
_TILES = Problem(
    B=2, H=4, Hk=2, N=45, M=40, D=3, Dv=40, dtype="fp32", config="32x16", softcap=1.5,
    alibi="normal", sinks="ordinary",
    mask=Mask(window_left=3, window_right=60, seqlens_k=(45, 38)),
)  # fmt: skip
# Rows that see one key each, of a low score. The last row of a full tile is the only one that sees
# the last key tile, or sees the last key before it. Rows of the two entries, whose splits differ,
# are joined by one program.
_ALONE = Problem(
    B=2, N=34, M=17, dtype="fp32", config="16x32", inputs="lse_low_130",
    mask=Mask(causal=True, window_left=0, seqlens_k=(34, 33)),
)  # fmt: skip
# An entry without keys, in a cache with places for several splits.
_EMPTY = Problem(
    N=40, dtype="fp64", config="16x16", sinks="ordinary", mask=Mask(seqlens_k=(0,))
)  # fmt: skip
# Rows of 16 bits in whole 16 bytes, on both sides of a border of key tiles.
_WIDE = Problem(
    B=2, H=4, Hk=2, N=40, M=5, D=24, Dv=24, dtype="bf16", config="16x16", seed=1,
    mask=Mask(causal=True, seqlens_k=(34, 18)),
)  # fmt: skip
# Heads of a group, and entries, that see other keys.
_MASKED = Problem(
    B=2, H=4, Hk=2, N=40, M=5, dtype="fp32", config="16x16",
    mask=dataclasses.replace(
        BlockSparse(percent=50, seed=11) & PrefixLM(prefix=3), seqlens_k=(37, 21)
    ),
)  # fmt: skip
# Keys in two blocks of columns, of which the second is loaded apart, in several key tiles.
_TWO_BLOCKS = Problem(
    H=2, Hk=1, N=40, M=3, D=132, Dv=4, dtype="fp32", config="16x16",
    mask=Mask(causal=True, seqlens_k=(37,)),
)  # fmt: skip
_PROBLEMS = (
    CacheProblem(attention=_MASKED, page_size=7),
    CacheProblem(attention=_ATTENTION, page_size=7, new=4, shared=2, spare=2),
    CacheProblem(attention=_ATTENTION, new=17, spare=2),
    CacheProblem(attention=_TILES, page_size=16, new=35, spare=1),
    CacheProblem(attention=_ALONE, page_size=3, new=1),
    CacheProblem(attention=_WIDE),
    CacheProblem(attention=_EMPTY),
    CacheProblem(attention=_TWO_BLOCKS, page_size=7),
)
_CHECKS = checks_of(kind="cache")
# The calls as they are drawn for each check.
_ASKED: dict[str, Callable[[CacheProblem], CacheProblem]] = {
    **dict.fromkeys(_CHECKS, lambda problem: problem),
    "hidden keys": lambda problem: hidden_first(problem, 17),
    "many keys": lengthened,
}
# The checks of calls of the same entries, which a mask with a predicate is for.
_OF_SAME_ENTRIES = ("accuracy", "pages", "free rows")


def is_of_caches(mutant: Mutant) -> bool:
    """Whether calls with a cache judge a mutant, by its files or the guarantees that it names."""
    of_caches = any(name[0] == "C" and name[1:].isdigit() for name in mutant.caught_by)
    return of_caches or any(edit.file in _FILES for edit in mutant.edits)


def kills_by_caches(subject: Subject) -> dict[str, Callable[[], Iterator[Kill]]]:
    """The calls with a cache, by name; each yields its first finding, as a check of no step."""
    return {
        f"caches {number}, {name}": partial(_kills, subject, asked(problem), name)
        for number, problem in enumerate(_PROBLEMS)
        for name, asked in _ASKED.items()
        # Entries without keys decode nothing.
        if name in _OF_SAME_ENTRIES
        or (problem.attention.mask.is_plain and min(problem.seqlens) > 0)
    }


def _kills(subject: Subject, problem: CacheProblem, name: str) -> Iterator[Kill]:
    with dots_in_order():
        yield from kills_of_call(f"cache {name}", subject, problem, _CHECKS[name])
