"""Hypothesis strategy of calls with a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.cache import OF_INPUTS, CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.declared_values import ANY_HEAD_DIM
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.problems.kernel_classes import combinations, padded_groups
from fa_verify.properties.problems.mask_classes import draw_instance
from fa_verify.properties.problems.seqlens import Draw

__all__ = [
    "cached", "configs_of", "format_fields", "hidden_first", "kernels_of", "lengthened",
    "may_append",
]  # fmt: skip

# Keys before the call: none, one, around a tile, and several tiles.
_KEYS = st.sampled_from((1, 0, 2, 5, 15, 16, 17, 33, 50))
_PAGES = (1, 0, 2, 3, 7, 16, 32, 64, 256)
# Heads of the cache, and query heads that share one. Many of them fill a tile, and more than 8 of
# them two of those that tensor cores take. Most calls have few, which cost less.
_HEADS = ((1, 1), (2, 1), (1, 2), (2, 3), (1, 5), (2, 8), (1, 9), (1, 16))
_INPUTS = ("normal", "times8", "rising_max", "near_ties", "lse_low_90", "large_mean_v")


# Places in the table that an entry of many keys gets at least, and the keys at most, by device: the
# interpreter is slow.
_PLACES, _LONGEST = 65, {"cpu": 2100, "cuda": 8300}
# Rows, windows and further keys, so that rows of one tile begin to see keys in two tiles of keys.
_ROWS, _WINDOWS, _MANY = 17, 21, 33
# Combinations of a configuration, padded head_dims and score modifications, if they are few, or as
# many as there are values of one of these.
_FEW = 4


def cached(
    subject: Subject,
    dtype: str,
    device: str,
    configs: Sequence[str],
    mask: type[Mask] | None = None,
    kernels: str | None = None,
    *,
    many_keys: bool = False,
    hides: bool = False,
) -> st.SearchStrategy[CacheProblem]:
    """Returns calls of a dtype, which shrink to one entry, few keys and pages of one row.

    Args:
        subject: The subject, whose declarations leave sizes, masks and pages.
        dtype: "fp16", "bf16", "fp32" or "fp64".
        device: "cpu" or "cuda".
        configs: Names of tile configurations.
        mask: A class of masks with a predicate, which does not depend on head dims and score
            modifications: these are then the simplest. None draws windows.
        kernels: Draw from a few combinations of the fields that select a kernel, which this seed
            chooses; None draws from all of them.
        many_keys: Lengthen an entry to more than 64 pages (fewer where a page has more than 32 rows
            on a CPU, or 127 on a GPU).
        hides: A mask hides keys from rows of low scores: a window the first tiles of a block of
            rows, or a causal mask the last keys where the subject takes no window.

    Raises:
        ExcludedError: The declarations exclude all such calls.
    """
    windowed = "window" in subject.masks
    if hides and not windowed and (subject.one_query or "causal" not in subject.masks):
        of_rows = ", and one_query" * subject.one_query
        raise ExcludedError(f"{subject.name} declares masks {subject.masks}{of_rows}")

    def made(
        keys: list[int], heads: tuple[int, int], window: tuple[Any, Any], more: int, page_size: int,
        new: int, is_shared: bool, spare: int, M: int, stored: tuple[str, str], **fields: Any,
    ) -> CacheProblem:  # fmt: skip
        of_format = format_fields(subject, *stored, page_size)
        if not may_append(of_format):
            new = 0
        left, right = window
        least = max(0 if subject.zero_sizes else 1, 0 if subject.m_gt_n else M)
        seqlens = tuple(max(least, x + new) for x in keys)
        if not subject.dv_ne_d:
            fields["Dv"] = fields["D"]
        mask = Mask(
            causal=right == 0, window_left=left, window_right=None if right == 0 else right,
            seqlens_k=seqlens,
        )  # fmt: skip
        Hk, group = heads
        attention = Problem(
            B=len(keys), H=Hk * group, Hk=Hk, M=M, N=max(seqlens) + more, dtype=dtype,
            device=device, mask=mask, sm_scale=subject.sm_scale, **fields,
        )  # fmt: skip
        shared = min(keys) // page_size if is_shared and page_size else 0
        return CacheProblem(
            attention=attention, page_size=page_size, new=new, shared=shared, spare=spare,
            **of_format,
        )  # fmt: skip

    masks, mods = subject.masks, subject.score_mods
    if mask is not None:
        subject = dataclasses.replace(
            subject, head_dims=(subject.head_dims or (16,))[:1], score_mods=()
        )
        masks, mods = (), ()
    rights = [
        right
        for right in ((0,) if subject.always_causal else (0, None, 0, 2))
        if right is None or ("window" if right else "causal") in masks
    ]
    kinds = [
        rows
        for rows in (_PAGES if subject.page_sizes is None else (*subject.page_sizes, 0))
        if ("paged" if rows else "contiguous") in subject.cache
        if rows
        or format_fields(subject, subject.cache_formats[0], "page", rows)
        or OF_INPUTS in subject.cache_formats
    ]
    fields = {
        "M": st.sampled_from((1,) if subject.one_query else (1, 2, 3, 5, 17)),
        "inputs": st.sampled_from(_INPUTS),
        "sinks": st.sampled_from(
            ("none", "none", "ordinary", "some_absent") if "sinks" in mods else ("none",)
        ),
        "seed": st.integers(0, 2**20),
        "layouts": st.just((subject.layouts or ("bhsd",))[:1] * 4),
        "dirty": st.just((subject.dirty or ("zero",))[0]),
    }
    others = {
        "keys": st.lists(_KEYS, min_size=1, max_size=3),
        "heads": st.sampled_from([x for x in _HEADS if subject.gqa or x[1] == 1]),
        "window": st.tuples(
            st.sampled_from((None, None, 0, 3, 20) if "window" in masks else (None,)),
            st.sampled_from(rights),
        ),
        "more": st.sampled_from((0, 1, 9)),
        "page_size": st.sampled_from(kinds),
        "new": st.sampled_from((0, 1, 2, 17) if "append" in subject.cache else (0,)),
        "is_shared": st.booleans(),
        "stored": _formats(subject),
        "spare": st.sampled_from((0, 1, 3)),
        **fields,
    }
    problems = st.one_of(
        [
            st.builds(made, **{name: st.sampled_from(x) for name, x in chosen.items()}, **others)
            for chosen in kernels_of(subject, configs, kernels)
        ]
    )
    if many_keys:
        problems = problems.map(lengthened)
    if hides:
        rows = 1 if subject.one_query else _ROWS
        problems = problems.map(lambda problem: hidden_first(problem, rows, windowed=windowed))
    return problems if mask is None else _masked(problems, mask)


def format_fields(subject: Subject, stored: str, scales: str, page_size: int) -> dict[str, Any]:
    """Return the fields of a call that name the format of its cache.

    Scales of pages need pages. Without them, another layout that the subject takes is in their
    place, or the format of inputs.
    """
    if scales == "page" and not page_size:
        scales = next((x for x in subject.cache_scales if x != "page"), "")
    if stored == OF_INPUTS or not scales:
        return {}
    return {"stored": stored, "scales": scales, "divides": subject.scale_divides}


def _formats(subject: Subject) -> st.SearchStrategy[tuple[str, str]]:
    """Return formats and scales, drawn only where there is a choice."""
    axes = (subject.cache_formats, subject.cache_scales)
    return st.tuples(*(st.sampled_from(x) if len(x) > 1 else st.just(x[0]) for x in axes))


def may_append(of_format: Mapping[str, Any]) -> bool:
    """Return whether a call with a cache of a format may have new keys."""
    scales, divides = of_format.get("scales"), of_format.get("divides", False)
    return scales != "page" and not (scales == "token_head" and divides)


def configs_of(subject: Subject, dtype: str) -> list[str]:
    """Return the configurations of a dtype: a few without splits, where there are such."""
    of_dtype = [
        name
        for name, declared in subject.configs.items()
        if dtype in declared.get("dtypes", subject.dtypes)
    ]
    few = ("16x16", "16x32", "32x16", "16x16-tf32")
    small = [name for name in of_dtype if name in few]
    return small or of_dtype


def kernels_of(
    subject: Subject, configs: Sequence[str], kernels: str | None
) -> list[dict[str, tuple[Any, ...]]]:
    """Return values of the fields that select a kernel: of all, or of a few for a seed.

    Each of the few has values of one kernel.
    """
    dims, mods = subject.head_dims, subject.score_mods
    # Each compiles a kernel, beside those of the same kernel for padded tensors.
    large = ANY_HEAD_DIM if subject.reads_caches_alone else ()
    # A tile can have 192 columns, no power of two, in two parts.
    constants: dict[str, tuple[Any, ...]] = {
        "config": tuple(configs),
        "D": dims or (16, 1, 3, 8, 20, 40, 64, 192, *large),
        "Dv": dims or (16, 1, 7, 17, 64, *large),
        "softcap": (None, None, 0.5) if "softcap" in mods else (None,),
        "alibi": ("none", "none", "normal") if "alibi" in mods else ("none",),
    }
    if kernels is None:
        return [constants]
    axes: dict[str, Sequence[Any]] = {
        name: [(x,) for x in dict.fromkeys(values)] for name, values in constants.items()
    }
    axes |= {name: padded_groups(constants[name]) for name in ("D", "Dv")}
    return [*combinations(axes, max(_FEW, *map(len, axes.values())), kernels)]


def lengthened(problem: CacheProblem) -> CacheProblem:
    """Return a call with more keys in one entry."""
    a = problem.attention
    more = min((problem.page_size or 16) * (_PLACES + a.seed % _PLACES), _LONGEST[a.device])
    lengths = tuple(x + more * (b == a.seed % a.B) for b, x in enumerate(problem.seqlens))
    return changed(problem, N=a.N + more, mask=dataclasses.replace(a.mask, seqlens_k=lengths))


def hidden_first(problem: CacheProblem, rows: int, *, windowed: bool = True) -> CacheProblem:
    """Return a causal call of low scores; a window hides the first keys of a tile."""
    a = problem.attention
    lengths = tuple(length + _MANY for length in problem.seqlens)
    left = a.seed % _WINDOWS if windowed else None
    mask = Mask(causal=True, window_left=left, seqlens_k=lengths)
    return changed(problem, M=rows, N=a.N + _MANY, mask=mask, inputs="lse_low_130", softcap=None)


@st.composite
def _masked(
    draw: Draw, problems: st.SearchStrategy[CacheProblem], mask: type[Mask]
) -> CacheProblem:
    """Draws problems whose windows are replaced by masks of a class."""
    problem: CacheProblem = draw(problems)
    a = problem.attention
    drawn = draw_instance(draw, mask, a.B, a.H, a.M, a.N)
    drawn = dataclasses.replace(drawn, seqlens_k=a.mask.seqlens_k)
    return dataclasses.replace(problem, attention=dataclasses.replace(a, mask=drawn))
