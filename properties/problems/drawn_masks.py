"""Draw the masks of problems: their kind, window and lengths, and forced features."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.problems.mask_classes import draw_instance
from fa_verify.properties.problems.seqlens import Domain, Draw, among, below

__all__ = ["chosen_lengths", "draw_mask"]


class _Kind(NamedTuple):
    """The parts of a mask."""

    causal: bool
    window: bool
    lengths: bool


@lru_cache(maxsize=64)
def _window_pool(max_seqlen: int, tile: int) -> tuple[tuple[int | None, int | None], ...]:
    """Return (window_left, window_right) pairs, one-sided ones first.

    Bounds are 0, small, near tile sizes, or larger than N. Small left bounds occur three times as
    often: the first key tile that a tile of rows visits is then hidden from its later rows.
    """
    near = (tile // 2, tile - 1, tile, tile + 1, 2 * tile)
    sides = sorted({0, 1, 2, 3, *near, max_seqlen // 3, max_seqlen + 1})
    lefts = sorted([*sides, *(1, 2, 3, tile // 2) * 2])
    return (
        *((left, None) for left in lefts for _ in range(4)),
        *((None, right) for right in sides for _ in range(2)),
        *((left, right) for left in lefts for right in sides),
    )


@lru_cache(maxsize=64)
def _kinds(
    masks: tuple[str, ...], lengths: tuple[bool, ...], always_causal: bool, windows: bool
) -> tuple[_Kind, ...]:
    """Return the kinds of masks to draw from, simplest first; sliding causal masks most often.

    Args:
        masks: Kinds, from ``strategies.MASK_KINDS``.
        lengths: Whether the masks have lengths: either or both.
        always_causal: Whether all masks are causal.
        windows: Whether all masks have a window.
    """
    positions = []
    if "full" in masks or set(masks) == {"padding"}:
        positions += [(False, False)] * 2
    if "causal" in masks:
        positions += [(True, False)] * 2
    if "window" in masks:
        positions += [(False, True)] * 2
    if "causal" in masks and "window" in masks:
        positions += [(True, True)] * 3
    kinds = tuple(_Kind(*position, given) for given in lengths for position in positions)
    return tuple(x for x in kinds if x.causal >= always_causal and x.window >= windows)


def _mask_kinds(domain: Domain) -> tuple[_Kind, ...]:
    """Return the kinds of masks that are compatible with the forced features."""
    masks = domain.masks
    if domain.hidden or domain.empty_by_position:
        masks = tuple(kind for kind in masks if kind != "full")
    needs_lengths = domain.padding or (
        domain.empty_rows
        and "padding" in masks
        and not (domain.empty_by_position and domain.m_ne_n)
    )
    lengths: tuple[bool, ...] = (False, True) if "padding" in masks else (False,)
    if needs_lengths or set(masks) == {"padding"}:
        lengths = (True,)
    # The one query of a causal mask sees every key.
    return _kinds(masks, lengths, domain.always_causal, domain.hidden and domain.one_query)


def chosen_lengths(size: int, even: int, code: int, B: int) -> list[int]:
    """Decode B lengths in [0, size] from octal digits: full, an edge, or the drawn ``even``."""
    edges = (size, size // 2, 1, 0, size - 1, even, even, even)
    return [min(size, max(0, edges[code >> 3 * b & 7])) for b in range(B)]


def _draw_lengths(
    draw: Draw, B: int, M: int, N: int, given: str
) -> tuple[list[int] | None, list[int] | None]:
    """Draw the lengths of queries and keys; ``given`` is "q", "k" or "both", None for the rest."""
    code = draw(below(8 ** (2 * B)))
    queries = keys = None
    if given != "q":
        keys = chosen_lengths(N, draw(below(N + 1)), code % 8**B, B)
    if given != "k":
        queries = chosen_lengths(M, draw(below(M + 1)), code // 8**B, B)
    return queries, keys


def draw_mask(draw: Draw, domain: Domain, B: int, H: int, M: int, N: int) -> Mask:
    """Draw a mask for B sequences of M queries and N keys. Batch entry 0 has the forced features.

    Args:
        draw: Argument of a composite strategy.
        domain: The kinds of masks or their class, and the forced features.
        B: Batch entries.
        H: Query heads.
        M: Query rows.
        N: Keys.
    """
    kind = draw(among(*_mask_kinds(domain)))
    left: int | None = None
    right: int | None = 0 if kind.causal else None
    if kind.window:
        left, window_right = draw(among(*_window_pool(domain.max_seqlen, domain.tile)))
        if kind.causal:
            left = window_right if left is None else left
        else:
            right = window_right
    queries, keys = None, None
    if kind.lengths:
        tensors: tuple[str, ...] = ("k", "both", "both")
        if domain.one_query:
            tensors = ("k",)
        elif not domain.forced:
            tensors += ("q",)
        queries, keys = _draw_lengths(draw, B, M, N, draw(among(*tensors)))
    rows, columns = _force_lengths(domain, queries, keys, M, N)
    if not (domain.m_gt_n and domain.zero_total):
        queries, keys = _narrow_lengths(domain, queries, keys, B, M, N)
        rows, columns = queries[0] if queries else M, keys[0] if keys else N
    left, right = _force_window(domain, left, right, rows, columns)
    mask = Mask(causal=kind.causal, window_left=left, window_right=None if kind.causal else right)
    if domain.mask is not None:
        mask = draw_instance(draw, domain.mask, B, H, M, N)
    return dataclasses.replace(
        mask,
        seqlens_q=None if queries is None else tuple(queries),
        seqlens_k=None if keys is None else tuple(keys),
    )


def _force_lengths(
    domain: Domain, queries: list[int] | None, keys: list[int] | None, M: int, N: int
) -> tuple[int, int]:
    """Adapt the lengths of batch entry 0 to the forced features, in place, and return them."""
    rows = M if not queries else queries[0]
    columns = N if not keys else keys[0]
    if not domain.forced:
        return rows, columns
    least = 2 if domain.hidden else 0
    if queries:
        rows = min(max(rows, least + domain.empty_rows), M)
        queries[0] = rows
    if keys:
        columns = min(columns, N - 1) if domain.padding else columns
        if domain.empty_by_position:
            columns = min(columns, rows - 1)
        elif domain.empty_rows:
            columns = 0
        columns = max(columns, least)
        keys[0] = columns
    return rows, columns


def _narrow_lengths(
    domain: Domain, queries: list[int] | None, keys: list[int] | None, B: int, M: int, N: int
) -> tuple[list[int] | None, list[int] | None]:
    """Return lengths that are not all 0, and with no more rows than keys, as the domain says."""
    if domain.padding and not domain.m_gt_n and (queries or M == N):
        queries = queries or [M] * B
        queries[0] = min(queries[0], N - 1)
    for lengths, size in ((queries, M), (keys, N)):
        if lengths and not any(lengths) and not domain.zero_total:
            lengths[0] = size
    if keys and not domain.m_gt_n:
        keys = [max(n, m) for n, m in zip(keys, queries or [M] * len(keys), strict=True)]
    return queries, keys


def _force_window(
    domain: Domain, left: int | None, right: int | None, rows: int, columns: int
) -> tuple[int | None, int | None]:
    """Narrow the window so that batch entry 0 has a forced empty row or hidden key."""
    if domain.empty_by_position:
        # Row 0 stands at position columns - rows and is empty if that + right < 0.
        right = (left or 0 if right is None else right) % (rows - columns)
    elif domain.hidden:
        # Row 0 must not see the last key, or the last row must not see key 0.
        if domain.one_query:
            return (0 if left is None else left % (columns - 1)), right
        right_hides = right is not None and right <= rows - 2
        left_hides = left is not None and left <= columns - 2
        if not right_hides and not left_hides:
            if right is not None:
                right %= rows - 1
            elif left is not None:
                left %= columns - 1
    return left, right
