"""Hypothesis strategies of merges and of rings."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.calls.merge import (
    LSE_FAMILIES,
    OUT_FAMILIES,
    STATE_LAYOUTS,
    MergeProblem,
)
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem

__all__ = ["merges", "rings"]

# Lengths of parts: none, one, around a tile, and long.
_KEYS = st.sampled_from((1, 0, 2, 7, 16, 17, 100, 4096))
_SIZES = st.sampled_from((1, 2, 3, 5, 7))
_COLUMNS = st.sampled_from((1, 3, 8, 16, 17, 40, 64, 100))
# The interpreter takes a fifth of a millisecond for a part of four rows.
_MOST_ROWS = 120


def merges(
    dtype: str, device: str, *, least_parts: int = 0, most_parts: int = 9, **fixed: object
) -> st.SearchStrategy[MergeProblem]:
    """Returns merges of a dtype, which shrink to few parts, short rows and plain storage.

    Args:
        dtype: "fp16", "bf16", "fp32" or "fp64".
        device: "cpu" or "cuda".
        least_parts: The fewest parts.
        most_parts: The most parts.
        fixed: Fields that are not drawn.
    """
    drawn: dict[str, st.SearchStrategy[object]] = {
        "parts": st.lists(_KEYS, min_size=least_parts, max_size=most_parts).map(tuple),
        "B": st.sampled_from((1, 2, 3, 0)),
        "H": _SIZES,
        "M": st.sampled_from((1, 2, 3, 5, 13, 0)),
        "Dv": _COLUMNS,
        "hidden": st.sampled_from((0, 0, 3, 8, 16)),
        "lse": st.sampled_from(LSE_FAMILIES),
        "out": st.sampled_from(OUT_FAMILIES),
        "layout": st.sampled_from(STATE_LAYOUTS),
        "dout_layout": st.sampled_from(STATE_LAYOUTS),
        "seed": st.integers(0, 2**20),
    }
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    made = st.builds(MergeProblem, dtype=st.just(dtype), device=st.just(device), **drawn)
    return made.filter(lambda x: x.B * x.H * x.M <= _MOST_ROWS)


def rings(dtype: str, device: str, config: str, **fixed: Any) -> st.SearchStrategy[RingProblem]:
    """Returns rings of a dtype.

    Parts can have no keys, and with a causal mask rows can see none of a part, or none at all.

    Args:
        dtype: "fp16", "bf16", "fp32" or "fp64".
        device: "cpu" or "cuda".
        config: Name of a tile configuration.
        fixed: Strategies in place of those of some fields of the attention, of G and of lengths.
    """

    def made(lengths: tuple[int, ...], Hk: int, G: int, **fields: Any) -> RingProblem:
        attention = Problem(
            H=Hk * G, Hk=Hk, N=sum(lengths), dtype=dtype, device=device, config=config, **fields
        )
        return RingProblem(attention=attention, lengths=lengths)

    lengths = st.lists(st.sampled_from((1, 0, 2, 5, 16, 17)), min_size=1, max_size=4).map(tuple)
    fields = {
        "lengths": lengths,
        "Hk": st.sampled_from((1, 2)),
        "G": st.sampled_from((1, 2, 3)),
        "B": st.sampled_from((1, 2)),
        "M": st.sampled_from((1, 2, 3, 17, 30)),
        "D": st.sampled_from((1, 3, 16)),
        "Dv": st.sampled_from((1, 8, 17)),
        "mask": st.sampled_from((Mask(), Mask(causal=True))),
        "inputs": st.sampled_from(("normal", "times8", "rising_max", "lse_low_90")),
        "seed": st.integers(0, 2**20),
    }
    return st.builds(made, **{**fields, **fixed})
