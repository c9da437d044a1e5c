"""Faults of the tiles that a pass visits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa_verify.diagnosis.named.masks import axes, sees
from fa_verify.diagnosis.named.named import FORWARD, Change, Named
from fa_verify.diagnosis.named.passes import Pass
from fa_verify.diagnosis.named.ranges import (
    Place,
    any_of,
    edge,
    first,
    full,
    last,
    places,
    ragged,
    split_of,
    spread,
)

__all__ = ["TILES"]


def _diagonal_stage(p: Pass, block_m: int, block_n: int) -> bool:
    m, n, rows, keys = axes(p)
    if p.case.problem.mask.right != 0:
        return False
    aligned = m // block_m * block_m + keys - rows + block_m
    return sees(p, p.seen & (n < aligned // block_n * block_n))


def _left_out(place: Place, over_rows: bool) -> Change:
    """Return a change that leaves pairs out."""
    return lambda p, m, n: sees(p, p.seen & ~place(p, m, n, over_rows))


def _twice(place: Place, over_rows: bool) -> Change:
    """Return a change that adds pairs twice."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        again = place(p, block_m, block_n, over_rows) & p.seen
        p.count = 1.0 + again.double()
        return bool(again.any())

    return change


def _overwritten(p: Pass, block_m: int, block_n: int) -> bool:
    """The sum over the last key tile replaces dq."""
    p.only["dq"] = last(p, block_m, block_n, False)
    return bool((p.seen & ~p.only["dq"]).any())


def _of_splits(kept: Callable[[Pass, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that keeps some of the key tiles that splits of the forward visit."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        tiles = any_of(p.seen, block_m, block_n)
        return p.case.splits > 1 and sees(
            p, p.seen & spread(kept(p, tiles), p.seen, block_m, block_n)
        )

    return change


def _even(p: Pass, tiles: torch.Tensor) -> torch.Tensor:
    place, count = places(tiles)
    return place < count // p.case.splits * p.case.splits


# Passes of dk and dv go over the keys, as the derivative of the forward does, or over rows.
_SERIES = tuple(
    Named(f"{what} {how}", f"{says} were {more}",
          tuple(make(place, over_rows) for over_rows in (False, True)), tiles="mn")
    for what, says, place in (
        ("tail", "the ragged last tile", ragged), ("first tile", "the first visited tile", first),
        ("last tile", "the last visited tile", last),
        ("edge tiles", "the visited tiles that need a mask", edge),
        ("full tiles", "the visited tiles that need no mask", full),
    )
    for how, more, make in (("left out", "left out", _left_out),
                            ("twice", "counted twice", _twice))
)  # fmt: skip

TILES: tuple[Named, ...] = (
    *_SERIES,
    Named("diagonal stage", "the tiles of keys ended where the query tile does",
          (_diagonal_stage,), tiles="mn", on_record="triton#8853"),
    Named("uneven splits", "the key tiles that do not divide evenly among the splits were left out",
          (_of_splits(_even),), FORWARD, "mn", on_record="rocMLIR#2371"),
    Named("split left out", "the first or the last split of the keys were left out",
          (_of_splits(lambda p, tiles: split_of(p, tiles) > 0),
           _of_splits(lambda p, tiles: split_of(p, tiles) < p.case.splits - 1)), FORWARD, "mn"),
    Named("dq overwritten", "the last key tile overwrote dq", (_overwritten,), ("dq",),
          "mn", on_record="levanter#449; fla#889"),
)  # fmt: skip
