"""Hypothesis strategies for problems. They draw descriptions, never tensors.

Interesting cases are constructed: nothing is filtered out, and empty rows, lengths of 0 and M > N
all occur. The sizes of a problem differ as often as its cost allows, because equal sizes hide
exchanged ones. A problem takes about twenty choices, whatever its size.

Every choice uses ``sampled_from`` with a different sequence. If two choices are of the same kind,
Hypothesis spends five of six runs on copies of a problem in which one choice repeats the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, TENSORS, Problem
from fa_verify.properties.inputs.families import (
    ALIBI,
    BIASES,
    DLSE,
    DOUT,
    INPUTS,
    NO_ALIBI,
    NO_BIAS,
    NO_DLSE,
    NO_SINKS,
    PADDING_VALUES,
    SINKS,
)
from fa_verify.properties.problems.drawn_masks import draw_mask
from fa_verify.properties.problems.mask_classes import check_mask_class
from fa_verify.properties.problems.seqlens import (
    Domain,
    Draw,
    Regime,
    among,
    below,
    draw_seqlens,
    seqlen_regimes,
    tile_count,
)

__all__ = ["HEAD_DIMS", "MASK_KINDS", "SCALES", "SOFTCAPS", "problems"]

MASK_KINDS = ("full", "causal", "window", "padding")
HEAD_DIMS = (16, 1, 2, 3, 5, 8, 15, 17, 24, 32, 33, 48, 64, 80, 96, 127, 128)
# The default scale D**-0.5 half of the time, then 1, then multiples of 0.02 up to 2.
SCALES: tuple[float | None, ...] = (
    *(None,) * 110,
    *(1.0,) * 10,
    *(step / 50 for step in range(1, 101)),
)
# Scales for rows of length 1: up to 128, each as likely as its double, and often 128 itself.
_SCALES_OF = {"cosine": (*(2.0 ** (step / 8) for step in range(-8, 57)), *(128.0,) * 8)}
# From a softcap that most scores reach to one that no score comes near.
SOFTCAPS = (50.0, 0.5, 1.0, 3.0, 10.0, 20.0, 30.0, 1e3, 1e6)


@lru_cache(maxsize=256)
def _head_pool(
    max_pairs: int, max_batch: int, max_heads: int, gqa: bool, empty_batch: bool
) -> tuple[tuple[int, int, int], ...]:
    """Return (B, Hk, G) with B H <= max_pairs, simplest first; distinct B, H, Hk ten times."""
    found = [
        (B, Hk, G)
        for B in range(1, max_batch + 1)
        for Hk in range(1, max_heads + 1)
        for G in range(1, (max_heads // Hk if gqa else 1) + 1)
        if B * Hk * G <= max_pairs
    ]
    found.sort(key=lambda sizes: (math.prod(sizes), sizes))
    pool = []
    for B, Hk, G in found:
        distinct = len({B, Hk, Hk * G}) == 3
        pool.extend([(B, Hk, G)] * (10 if distinct else 1))
    pool = [sizes for sizes in pool for _ in range(1 + 30 // len(pool))]
    return (*pool, *[(0, 1, 1)] * (1 + len(pool) // 60)) if empty_batch else tuple(pool)


# Limits of the rare problems with many heads: batch entries, query heads, query heads of a group.
_MOST_ENTRIES, _MOST_HEADS, _LARGEST_GROUP = 9, 40, 17
# Among problems of one tile both ways, one in so many has many heads.
_FEW = 3


@lru_cache(maxsize=256)
def _large_head_pool(
    few: tuple[tuple[int, int, int], ...], max_pairs: int, gqa: bool
) -> tuple[tuple[int, int, int], ...]:
    """Return ``few``, the pool of small (B, Hk, G), with a share of those of B H <= max_pairs."""
    many = [
        (B, Hk, G)
        for B in range(1, _MOST_ENTRIES + 1)
        for G in range(1, (_LARGEST_GROUP if gqa else 1) + 1)
        for Hk in range(1, min(_MOST_HEADS, max_pairs // B) // G + 1)
    ]
    many = sorted(set(many) - set(few), key=lambda sizes: (math.prod(sizes), sizes))
    # Simplest first, so that a problem shrinks to few heads.
    times = -(-(_FEW - 1) * len(many) // len(few))
    return tuple(sizes for sizes in few for _ in range(max(1, times))) + tuple(many)


def _draw_heads(draw: Draw, domain: Domain, M: int, N: int) -> tuple[int, int, int]:
    """Draw (B, Hk, G) within the remaining cost; rarely many, where M and N are one tile each."""
    pairs = domain.max_cost // (tile_count(domain, M) * tile_count(domain, N))
    empty = domain.zero_sizes and not domain.forced
    pool = _head_pool(pairs, domain.max_batch, domain.max_heads, domain.gqa, empty)
    if domain.max_pairs and 0 < min(M, N) and max(M, N) <= domain.tile:
        pool = _large_head_pool(pool, domain.max_pairs, domain.gqa)
    sizes: tuple[int, int, int] = draw(among(*pool))
    return sizes


def _draw_head_dims(draw: Draw, domain: Domain, M: int, N: int) -> tuple[int, int]:
    """Draw (D, Dv), different from M and N if possible; equal in one of five draws, if they can."""
    others, others_v = (
        [d for d in dims if d not in (M, N)] or list(dims)
        for dims in (domain.head_dims, domain.head_dims_v)
    )
    D = draw(among(*others))
    if not domain.dv_ne_d:
        return D, D
    different = [d for d in others_v if d != D]
    equal = [D] * (1 + len(different) // 4) if D in others_v else []
    return D, draw(among(*equal, *different))


def _draw_layouts(draw: Draw, layouts: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Draw four layouts with one choice."""
    base = len(layouts)
    code = draw(below(base ** len(TENSORS)))
    q, k, v, dout = (layouts[code // base**place % base] for place in range(len(TENSORS)))
    return q, k, v, dout


@st.composite
def _drawn_problems(draw: Draw, domain: Domain, regimes: tuple[Regime, ...]) -> Problem:
    """Draw the sequence lengths first, then batch and heads within the remaining cost."""
    M, N = draw_seqlens(draw, domain, regimes)
    B, Hk, G = _draw_heads(draw, domain, M, N)
    D, Dv = _draw_head_dims(draw, domain, M, N)
    mask = draw_mask(draw, domain, B, Hk * G, M, N)
    rows, keys = mask.lengths(B, M, N)
    padded = any(rows[b] < M or keys[b] < N for b in range(B))
    inputs = draw(among(*domain.inputs))
    scales = _SCALES_OF.get(inputs, SCALES) if domain.scales == SCALES else domain.scales
    return Problem(
        B=B,
        H=Hk * G,
        Hk=Hk,
        M=M,
        N=N,
        D=D,
        Dv=Dv,
        mask=mask,
        dtype=draw(among(*domain.dtypes)),
        sm_scale=draw(among(*scales)),
        layouts=_draw_layouts(draw, domain.layouts),
        inputs=inputs,
        dout=draw(among(*domain.dout)),
        dlse=draw(among(*domain.dlse)),
        dirty=draw(among(*domain.dirty)) if padded else domain.dirty[0],
        config=draw(among(*domain.configs)),
        seed=draw(st.integers(0, 2**31 - 1)),
        device=domain.device,
        softcap=draw(among(*domain.softcaps)),
        alibi=draw(among(*domain.alibis)),
        bias=draw(among(*domain.biases)),
        sinks=draw(among(*domain.sinks)),
    )


def _chosen(
    name: str, fixed: str | None, known: tuple[str, ...], first: int = 1
) -> tuple[str, ...]:
    """Return the fixed value only, or all known values, the first one ``first`` times."""
    if fixed is None:
        return known[:1] * (first - 1) + known
    if fixed not in known:
        raise ValueError(f"{name} is {fixed!r}; needs None or one of {known}")
    return (fixed,)


def _check_subset(name: str, given: tuple[Any, ...], known: tuple[Any, ...]) -> None:
    if not given or any(item not in known for item in given):
        raise ValueError(f"{name} is {given!r}; needs some of {known}")


def _check(domain: Domain) -> None:
    """Raise ValueError for arguments that no problem satisfies."""
    _check_subset("dtypes", domain.dtypes, DTYPES)
    _check_subset("masks", domain.masks, MASK_KINDS)
    _check_subset("layouts", domain.layouts, LAYOUTS)
    _check_subset("dirties", domain.dirty, tuple(PADDING_VALUES))
    _check_subset("device", (domain.device,), ("cpu", "cuda"))
    _check_subset("alibis", domain.alibis, (NO_ALIBI, *ALIBI))
    _check_subset("biases", domain.biases, (NO_BIAS, *BIASES))
    _check_subset("sinks", domain.sinks, (NO_SINKS, *SINKS))
    for name in ("configs", "head_dims", "head_dims_v", "scales", "softcaps"):
        if not getattr(domain, name):
            raise ValueError(f"{name} is empty; needs at least one")
    for name in ("max_seqlen", "seqlen_multiple", "tile", "max_batch", "max_heads", "max_cost"):
        if getattr(domain, name) < 1:
            raise ValueError(f"{name} is {getattr(domain, name)}; needs at least 1")
    if domain.max_pairs < 0:
        raise ValueError(f"max_pairs is {domain.max_pairs}; needs at least 0")
    for name in ("head_dims", "head_dims_v"):
        if any(dim < 1 for dim in getattr(domain, name)):
            raise ValueError(f"{name} is {getattr(domain, name)}; needs sizes of at least 1")
    if domain.mask is not None:
        _check_subset("masks", domain.masks, ("full", "padding"))
        check_mask_class(domain.mask)
    if domain.padding and "padding" not in domain.masks:
        raise ValueError(f"padding=True needs 'padding' among masks; got {domain.masks}")
    positional = "causal" in domain.masks or "window" in domain.masks
    if domain.always_causal and "causal" not in domain.masks:
        raise ValueError(f"always_causal=True needs 'causal' among masks; got {domain.masks}")
    if domain.empty_rows and not domain.m_gt_n:
        raise ValueError("empty_rows=True needs m_gt_n=True")
    if domain.one_query and domain.hidden and (domain.empty_rows or "window" not in domain.masks):
        raise ValueError(
            "hidden=True with one_query=True needs 'window' among masks, no empty rows"
        )
    if domain.hidden and not positional:
        raise ValueError(f"hidden=True needs 'causal' or 'window' among masks; got {domain.masks}")
    if domain.empty_rows and not domain.m_ne_n and "padding" not in domain.masks:
        raise ValueError("empty_rows=True with m_ne_n=False needs 'padding' among masks")


def problems(
    *,
    dtype: str | None = None,
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16", "fp64"),
    config: str | None = None,
    configs: Sequence[str] = ("default",),
    masks: Sequence[str] = MASK_KINDS,
    always_causal: bool = False,
    max_seqlen: int = 64,
    seqlen_multiple: int = 1,
    tile: int = 16,
    max_batch: int = 3,
    max_heads: int = 4,
    max_pairs: int = 0,
    gqa: bool = True,
    m_ne_n: bool = True,
    m_gt_n: bool = True,
    one_query: bool = False,
    dv_ne_d: bool = True,
    head_dims: Sequence[int] = HEAD_DIMS,
    head_dims_v: Sequence[int] | None = None,
    scales: Sequence[float | None] = SCALES,
    layouts: Sequence[str] = LAYOUTS,
    inputs: str | None = None,
    dout: str | None = None,
    lse_grad: bool = False,
    dirty: str | None = None,
    dirties: Sequence[str] = tuple(PADDING_VALUES),
    max_cost: int = 48,
    padding: bool = False,
    hidden: bool = False,
    empty_rows: bool = False,
    zero_sizes: bool = True,
    zero_total: bool = True,
    device: str = "cpu",
    mask: type[Mask] | None = None,
    softcaps: Sequence[float | None] = (None,),
    alibis: Sequence[str] = (NO_ALIBI,),
    biases: Sequence[str] = (NO_BIAS,),
    sinks: Sequence[str] = (NO_SINKS,),
) -> st.SearchStrategy[Problem]:
    """Strategy for problems. A field whose argument is None is drawn; a value fixes it.

    Shrinks towards ``Problem()``: B = H = Hk = M = N = 1, D = Dv = 16 (the first of head_dims), no
    mask, the default scale, contiguous tensors, "normal" families, and the first element of every
    sequence. M > N shrinks to 2 rows and 1 key, or 1 row and no key. An empty row shrinks to one of
    these, the first under a causal mask, or to a key length of 0. With forced features, M and N are
    at least 1 more than the number of features; forced empty rows add one more to M.

    In more than half of the problems both M and N span two tiles, if max_seqlen and max_cost allow
    it.

    Args:
        dtype: The dtype; None draws one of dtypes.
        dtypes: Dtypes to draw from.
        config: The tile configuration; None draws one of configs.
        configs: Tile configurations to draw from.
        masks: Kinds of masks, from MASK_KINDS. "causal" and "window" together also allow sliding
            causal windows. "padding" adds lengths to half of the masks (to all, if alone).
        always_causal: Whether every mask is causal.
        max_seqlen: Largest M and N.
        seqlen_multiple: M and N are multiples of this; the lengths of the mask need not be.
        tile: Rows and keys of a tile. Sizes cluster around its multiples, and it is the unit of
            the cost.
        max_batch: Largest B. B = 0 is rare.
        max_heads: Largest H.
        max_pairs: Largest B * H of a few problems with M and N of one tile each, whatever
            max_batch, max_heads and max_cost are. They have up to 9 batch entries, 40 heads and
            17 heads in a group. 0 draws none of them.
        gqa: Whether H > Hk may occur.
        m_ne_n: Whether M != N may occur.
        m_gt_n: Whether M > N may occur, in a sequence too.
        one_query: Whether M is 1. Only keys then have lengths, and seqlen_multiple is one of N.
        dv_ne_d: Whether Dv != D may occur.
        head_dims: Sizes of D, and of Dv without head_dims_v.
        head_dims_v: Sizes of Dv; None is those of D.
        scales: Values of sm_scale, drawn uniformly; None is the default D**-0.5. Without it, the
            inputs "cosine" have scales from 1/2 to 128.
        layouts: Storage layouts, drawn for each tensor.
        inputs: The input family; None draws one of ``families.INPUTS``.
        dout: The dout family; None draws one of ``families.DOUT``.
        lse_grad: Whether lse may have a gradient, from one of ``families.DLSE``.
        dirty: The family of padding values; None draws one of dirties if there is padding.
        dirties: Families of padding values to draw from.
        max_cost: Limit on B * H * ceil(M / tile) * ceil(N / tile); the Triton interpreter takes
            about 0.03 s per unit.
        padding: Force padding keys in batch entry 0. False leaves it to the draw, also below.
        hidden: Force a valid key in batch entry 0 that a valid row does not see.
        empty_rows: Force a valid row in batch entry 0 without a visible key.
        zero_sizes: Whether B, M or N may be 0.
        zero_total: Whether all lengths of the mask may be 0.
        device: "cpu" or "cuda".
        mask: A class of masks to draw from. ``masks`` then says whether they have lengths, from
            ("full", "padding").
        softcaps: Values of softcap, drawn uniformly; None is no softcap.
        alibis: Families of ALiBi slopes, from ``families.ALIBI`` or "none", drawn uniformly.
        biases: Families of the bias with their axes, from ``families.BIASES`` or "none", drawn
            uniformly.
        sinks: Families of sinks, from ``families.SINKS`` or "none", drawn uniformly.

    Raises:
        ValueError: An argument is out of range, or no problem satisfies all of them.
    """
    domain = Domain(
        dtypes=_chosen("dtype", dtype, tuple(dtypes)),
        configs=_chosen("config", config, tuple(configs)),
        masks=tuple(masks),
        always_causal=always_causal,
        max_seqlen=max_seqlen,
        seqlen_multiple=seqlen_multiple,
        tile=tile,
        max_batch=max_batch,
        max_heads=max_heads,
        max_pairs=max_pairs,
        gqa=gqa,
        m_ne_n=m_ne_n,
        m_gt_n=m_gt_n,
        one_query=one_query,
        dv_ne_d=dv_ne_d,
        head_dims=tuple(head_dims),
        head_dims_v=tuple(head_dims if head_dims_v is None else head_dims_v),
        scales=tuple(scales),
        layouts=tuple(layouts),
        inputs=_chosen("inputs", inputs, tuple(INPUTS), first=4),
        dout=_chosen("dout", dout, tuple(DOUT), first=4),
        dlse=(NO_DLSE,) * 6 + tuple(DLSE) if lse_grad else (NO_DLSE,),
        dirty=_chosen("dirty", dirty, tuple(dirties)),
        max_cost=max_cost,
        padding=padding,
        hidden=hidden,
        empty_rows=empty_rows,
        zero_sizes=zero_sizes,
        zero_total=zero_total,
        device=device,
        mask=mask,
        softcaps=tuple(softcaps),
        alibis=tuple(alibis),
        biases=tuple(biases),
        sinks=tuple(sinks),
    )
    _check(domain)
    regimes = seqlen_regimes(domain)
    if not regimes:
        raise ValueError(
            f"no sequence lengths satisfy max_seqlen={max_seqlen}, "
            f"seqlen_multiple={seqlen_multiple}, max_cost={max_cost}, tile={tile} "
            f"and {domain.forced} forced features"
        )
    return _drawn_problems(domain, regimes)
