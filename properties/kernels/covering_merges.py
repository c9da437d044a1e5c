"""Merges in which every two values of shape, parts and storage occur together."""

from __future__ import annotations

from typing import Any

from fa_verify.oracles.calls.merge import (
    LSE_FAMILIES,
    OUT_FAMILIES,
    STATE_LAYOUTS,
    MergeProblem,
)
from fa_verify.properties.kernels.covering_calls import CoveringCalls
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.ways import WAY, seed_of, ways_of
from fa_verify.properties.problems.covering import Constraint, Row, covering, random_of

__all__ = ["covering_merges"]

# Sizes of each class.
_PARTS = ((1,), (2,), tuple(range(3, 9)), (9, 17))
_B, _H, _M = ((1,), (2, 3)), ((1,), (2, 3, 5), (17,)), ((1,), (2, 3, 5), (13, 17))
# A kernel may be compiled for each Dv: they are those that are drawn.
_DV = ((1, 3), (8, 16, 64), (17, 40, 100))
_KEYS = (1, 2, 7, 16, 17, 100, 4096)
# Parts that saw nothing.
_FIRST, _LAST, _TWO, _ALL, _ROWS = "first", "last", "two in a row", "all", "in some rows"


def covering_merges(subject: Subject, device: str) -> CoveringCalls[MergeProblem]:
    """Return merges that have every two values that the declarations allow together.

    Args:
        subject: The subject; without merges of states on the device it has no calls.
        device: "cpu" or "cuda".
    """
    if subject.states is None or device not in subject.devices:
        return CoveringCalls((), ())
    factors: dict[str, tuple[Any, ...]] = {
        "parts": _PARTS, "B": _B, "H": _H, "M": _M, "Dv": _DV, "dtype": tuple(subject.dtypes),
        "empty part": ("none", _FIRST, _LAST, _TWO, _ALL, _ROWS),
        "lse": LSE_FAMILIES, "out": OUT_FAMILIES, "layout": STATE_LAYOUTS,
        WAY: ways_of(subject, "merge"),
    }  # fmt: skip
    if subject.backward:
        factors["layout of gradients"] = STATE_LAYOUTS

    def may(row: Row) -> bool:
        """Return whether there are parts enough: a single one that is empty is all of them."""
        least = {_FIRST: _PARTS[1], _LAST: _PARTS[1], _TWO: _PARTS[2]}.get(row["empty part"])
        return least is None or _PARTS.index(row["parts"]) >= _PARTS.index(least)

    # Ways do not meet values and storage, whose pairs would need more rows.
    strengths = [
        ([x for x in factors if x != WAY], 2),
        ([x for x in factors if x not in ("lse", "out") and not x.startswith("layout")], 2),
    ]
    array = covering(
        factors, strengths, [Constraint(("parts", "empty part"), may)], seed=subject.name
    )
    return CoveringCalls.of(array, lambda row: _call(subject, device, row))


def _call(subject: Subject, device: str, row: Row) -> MergeProblem:
    """Return the merge of a row. All that the row leaves open depends on it alone."""
    rng = random_of(row)
    sizes = {name: rng.choice(row[name]) for name in ("B", "H", "M", "Dv")}
    parts = [rng.choice(_KEYS) for _ in range(rng.choice(row["parts"]))]
    empty = row["empty part"]
    start = rng.randrange(len(parts) - 1) if empty == _TWO else 0
    numbers = {
        _FIRST: (0,), _LAST: (len(parts) - 1,), _TWO: (start, start + 1), _ALL: range(len(parts)),
    }  # fmt: skip
    seed = seed_of(rng, ways_of(subject, "merge"), row[WAY])
    for number in numbers.get(empty, ()):
        parts[number] = 0
    return MergeProblem(
        parts=tuple(parts), dtype=row["dtype"], hidden=5 if empty == _ROWS else 0, lse=row["lse"],
        out=row["out"], layout=row["layout"], seed=seed, device=device,
        dout_layout=row.get("layout of gradients", "parts"), **sizes,
    )  # fmt: skip
