"""Calls with a cache in which every two values of shape, cache and mask occur together.

Draws leave conjunctions to chance: a fault that needs a group past 8 heads and a window is met by
few calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fa_verify.oracles.calls.cache import OF_INPUTS, PAGE_ORDERS, CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.kernels.covering_calls import CoveringCalls
from fa_verify.properties.kernels.declared_values import ANY_HEAD_DIM
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported_caches import (
    configs_of,
    format_fields,
    kernels_of,
    may_append,
)
from fa_verify.properties.kernels.ways import WAY, seed_of, ways_of
from fa_verify.properties.problems.covering import Constraint, Row, covering, random_of

__all__ = ["covering_caches"]

# Sizes of each class.
_B, _HK, _M = ((1,), (2, 3), (9,)), ((1,), (2,)), ((1,), (2, 3, 5))
# A kernel may be compiled for each group. On a GPU they are some of those that are drawn.
_G = {
    "cpu": ((1,), (2, 3, 4), (5, 6, 7, 8), tuple(range(9, 17))),
    "cuda": ((1,), (3,), (8,), (9, 16)),
}
# Lengths of the longest entry, and of the others beside it.
_IN_A_PAGE, _AT_ITS_EDGE, _OVER_PAGES, _AT_A_TILE = "in a page", "its edge", "over pages", "a tile"
_FULL, _RAGGED, _SOME_0, _ON_EDGES = "full", "ragged", "some 0", "on page edges"
# Keys around the edges of tiles, and those that stand for a page of a contiguous cache.
_TILES, _ROWS = (16, 17, 63, 64, 65), 16
_PAGES, _LONGEST = (1, 3, 16, 64), {"cpu": 300, "cuda": 4000}
_NARROW, _WIDE = (16, 24), (64, 128)


def covering_caches(
    subject: Subject, device: str, kernels: str | None
) -> CoveringCalls[CacheProblem]:
    """Return calls that have every two values that the declarations allow together.

    Args:
        subject: The subject; without a cache on the device it has no calls.
        device: "cpu" or "cuda".
        kernels: As in ``cached``, whose calls have the same few kernels then; the dtype follows it.
    """
    if subject.kvcache is None or device not in subject.devices:
        return CoveringCalls((), ())
    configs = {dtype: names for dtype in DTYPES if (names := configs_of(subject, dtype))}
    factors = _factors(subject, device, configs, kernels)

    def may(row: Row) -> bool:
        call = _call(subject, device, row)
        appends = call.new > 0
        return (
            subject.excludes_cache(call.attention, call.page_size, appends=appends) is None
            and subject.excludes_format(call.stored, call.scales, divides=call.divides) is None
        )

    constraints = [
        Constraint(("B", "lengths"), lambda row: row["B"] != _B[0] or row["lengths"] == _FULL),
        Constraint(
            ("lengths", "append"), lambda row: row["lengths"] != _SOME_0 or not row["append"]
        ),
        Constraint(("page", "order"), lambda row: row["page"] > 0 or row["order"] != "descending"),
        *_of_formats(factors),
        Constraint(("dtype", "config"), lambda row: row["config"] in configs[row["dtype"]]),
        Constraint(tuple(factors), may),
    ]
    array = covering(factors, [([*factors], 2)], constraints, seed=subject.name)
    return CoveringCalls.of(array, lambda row: _call(subject, device, row))


def _of_formats(factors: Mapping[str, object]) -> list[Constraint]:
    """Return the constraints of formats, pages and appends, where formats are among the factors."""
    if "stored" not in factors:
        return []
    return [
        Constraint(("scales", "page"), lambda row: row["scales"] != "page" or row["page"] > 0),
        Constraint(("scales", "append"), lambda row: row["scales"] != "page" or not row["append"]),
    ]


def _factors(
    subject: Subject, device: str, configs: Mapping[str, Sequence[str]], kernels: str | None
) -> dict[str, tuple[Any, ...]]:
    """Return the values of each factor that the declarations leave."""
    pages = (subject.page_sizes or _PAGES) if "paged" in subject.cache else ()
    found: dict[str, tuple[Any, ...]] = {
        "B": _B, "Hk": _HK, "G": _G[device] if subject.gqa else _G[device][:1],
        "M": _M[:1] if subject.one_query else _M,
        "N": (_IN_A_PAGE, _AT_ITS_EDGE, _OVER_PAGES, _AT_A_TILE),
        "page": (*pages, *([0] if "contiguous" in subject.cache else [])),
        "order": PAGE_ORDERS,
        "append": (False, True) if "append" in subject.cache else (False,),
        "causal": (True,) if subject.always_causal
        else (False, True) if "causal" in subject.masks else (False,),
        "window": (None, 0, 3, 20) if "window" in subject.masks else (None,),
        "lengths": (_FULL, _RAGGED, _SOME_0, _ON_EDGES), WAY: ways_of(subject, "cache"),
    }  # fmt: skip
    if subject.cache_formats != (OF_INPUTS,):
        found |= {"stored": subject.cache_formats, "scales": subject.cache_scales}
    if kernels is not None:
        # The first values of each of the few.
        found["kernel"] = tuple(
            (("dtype", dtype), *((name, values[0]) for name, values in kernel.items()))
            for dtype, names in configs.items()
            for kernel in kernels_of(subject, names, f"{kernels}{dtype}")
        )
        return found
    dims = tuple(sorted(subject.head_dims or (*ANY_HEAD_DIM[1:2], *_NARROW, *_WIDE)))
    names = dict.fromkeys(name for of_dtype in configs.values() for name in of_dtype)
    found |= {"dtype": tuple(configs), "config": tuple(names), "D": dims}
    return found | ({"Dv": dims} if subject.dv_ne_d else {})


def _call(subject: Subject, device: str, row: Row) -> CacheProblem:
    """Return the call of a row. All that the row leaves open depends on it alone."""
    rng = random_of(row)
    B, Hk, group, M = (rng.choice(row[name]) for name in ("B", "Hk", "G", "M"))
    size, most = row["page"] or _ROWS, _LONGEST[device]
    pages = rng.randint(1, max(1, min(3, most // size)))
    new = rng.randint(1, 3) if row["append"] else 0
    of_format = {}
    if "stored" in row:
        of_format = format_fields(subject, row["stored"], row["scales"], row["page"])
    if not may_append(of_format):
        new = 0
    longest = {
        _IN_A_PAGE: rng.randint(1, size), _AT_ITS_EDGE: pages * size,
        _OVER_PAGES: pages * size + rng.randint(1, size), _AT_A_TILE: rng.choice(_TILES),
    }[row["N"]]  # fmt: skip
    least = max(1, new, 0 if subject.m_gt_n else M)
    longest = max(longest, least)
    lengths = [longest] * B
    others = range(1, B)
    for b in others if row["lengths"] != _FULL else ():
        edges = range(-(-least // size) * size, longest + 1, size) or [longest]
        lengths[b] = (
            rng.choice(edges) if row["lengths"] == _ON_EDGES else rng.randint(least, longest)
        )
    if row["lengths"] == _SOME_0:
        lengths[-1] = 0
    kernel = {name: row[name] for name in ("dtype", "config", "D", "Dv") if name in row}
    kernel |= row.get("kernel", ())
    if not subject.dv_ne_d:
        kernel["Dv"] = kernel["D"]
    rng.shuffle(lengths)
    layout = (subject.layouts or ("bhsd",))[0]
    attention = Problem(
        B=B, H=Hk * group, Hk=Hk, M=M, N=longest, device=device,
        sm_scale=subject.sm_scale, seed=seed_of(rng, ways_of(subject, "cache"), row[WAY]),
        mask=Mask(causal=row["causal"], window_left=row["window"], seqlens_k=tuple(lengths)),
        layouts=(layout, layout, layout, layout), dirty=(subject.dirty or ("zero",))[0],
        **kernel,
    )  # fmt: skip
    return CacheProblem(
        attention=attention, page_size=row["page"], new=new, order=row["order"], **of_format
    )
