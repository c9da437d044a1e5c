"""Hypothesis strategy of calls with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem

__all__ = ["cached"]

# Keys before the call: none, one, around a tile, and several tiles.
_KEYS = st.sampled_from((1, 0, 2, 5, 15, 16, 17, 33, 50))
_PAGES = st.sampled_from((1, 0, 2, 3, 7, 16, 32, 64, 256))
_INPUTS = ("normal", "times8", "rising_max", "near_ties", "lse_low_90", "large_mean_v")


def cached(dtype: str, device: str, configs: Sequence[str]) -> st.SearchStrategy[CacheProblem]:
    """Returns calls of a dtype, which shrink to one entry, few keys and pages of one row.

    Args:
        dtype: "fp16", "bf16", "fp32" or "fp64".
        device: "cpu" or "cuda".
        configs: Names of tile configurations.
    """

    def made(
        keys: list[int], heads: tuple[int, int], window: tuple[Any, Any], more: int, page_size: int,
        new: int, is_shared: bool, spare: int, **fields: Any,
    ) -> CacheProblem:  # fmt: skip
        left, right = window
        seqlens = tuple(x + new for x in keys)
        mask = Mask(
            causal=right == 0, window_left=left, window_right=None if right == 0 else right,
            seqlens_k=seqlens,
        )  # fmt: skip
        Hk, group = heads
        attention = Problem(
            B=len(keys), H=Hk * group, Hk=Hk, N=max(seqlens) + more, dtype=dtype, device=device,
            mask=mask, **fields,
        )  # fmt: skip
        shared = min(keys) // page_size if is_shared and page_size else 0
        return CacheProblem(
            attention=attention, page_size=page_size, new=new, shared=shared, spare=spare
        )

    fields = {
        "M": st.sampled_from((1, 2, 3, 5, 17)),
        "D": st.sampled_from((16, 1, 3, 8, 20, 40, 64)),
        "Dv": st.sampled_from((16, 1, 7, 17, 64)),
        "inputs": st.sampled_from(_INPUTS),
        "softcap": st.sampled_from((None, None, 1.5)),
        "alibi": st.sampled_from(("none", "none", "normal")),
        "config": st.sampled_from(tuple(configs)),
        "seed": st.integers(0, 2**20),
    }
    return st.builds(
        made,
        keys=st.lists(_KEYS, min_size=1, max_size=3),
        heads=st.sampled_from(((1, 1), (1, 2), (2, 1), (2, 3))),
        window=st.tuples(st.sampled_from((None, None, 0, 3, 20)), st.sampled_from((0, None, 0, 2))),
        more=st.sampled_from((0, 1, 9)),
        page_size=_PAGES,
        new=st.sampled_from((0, 1, 2, 17)),
        is_shared=st.booleans(),
        spare=st.sampled_from((0, 1, 3)),
        **fields,
    )
