"""The tensors of a call with a cache: its pages, the page table, and new keys and values."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import NamedTuple

import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.stream import uniform
from fa_verify.properties.inputs.tensors import Inputs, make

__all__ = [
    "CacheInputs", "UnchangedInputs", "is_in_order", "make_cache", "rows_of_entry", "shared_inputs"
]  # fmt: skip


class UnchangedInputs(NamedTuple):
    """The tensors of a call that it must not write to."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None


class CacheInputs(NamedTuple):
    """The tensors of a call.

    Args:
        q: (B, H, M, D).
        k_cache: (pages, page_size, Hk, D), or (entries, S, Hk, D).
        v_cache: As ``k_cache``, with Dv columns.
        k: New keys (B, Hk, L, D), or None.
        v: New values (B, Hk, L, Dv), or None.
        cache_seqlens: Int32 (B,), the keys of each entry before the call.
        page_table: Int32 (B, places); None for a contiguous cache.
        cache_batch_idx: Int32 (B,); None for pages.
        alibi_slopes: (H,) or (B, H), float32; or None.
        sinks: (H,), float32; or None.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def without_caches(self) -> UnchangedInputs:
        """The tensors that the call must not write to."""
        given = self._asdict()
        return UnchangedInputs(**{name: given[name] for name in UnchangedInputs._fields})

    @property
    def table(self) -> torch.Tensor:
        """The pages of each entry; one for an entry of a contiguous cache."""
        if self.page_table is not None:
            return self.page_table
        assert self.cache_batch_idx is not None
        return self.cache_batch_idx[:, None]


def shared_inputs(problem: CacheProblem) -> Inputs:
    """Returns the tensors of the attention, where entries agree in the pages that they share."""
    inputs = make(problem.attention)
    rows = problem.shared * problem.page_size
    if rows and len(inputs.k) > 1:
        k, v = (x.clone() for x in (inputs.k, inputs.v))
        for x in (k, v):
            x[1:, :, :rows] = x[:1, :, :rows].clone()
        inputs = inputs._replace(k=k, v=v)
    return inputs


def _numbers(problem: CacheProblem, order: int | None, pages: int) -> list[int]:
    """Returns the number of each page, drawn for an ``order``; None is descending."""
    if order is None or (order == 0 and problem.order == "descending"):
        return list(range(pages))[::-1]
    if order == 0 and problem.order == "ascending":
        return list(range(pages))
    drawn = uniform(problem.attention.seed, f"pages {order}", (pages,))
    return [int(i) for i in drawn.argsort()]


def _pages(
    problem: CacheProblem, page_size: int, together: int, order: int | None
) -> tuple[int, list[list[int]]]:
    """Returns the number of pages of a cache, and the pages of each entry.

    An entry of a contiguous cache, of ``page_size`` 0, has one page. ``together`` pages are those
    of all entries.
    """
    counts = [-(-length // page_size) if page_size else 1 for length in problem.seqlens]
    private = [max(0, count - together) for count in counts]
    pages = sum(private) + together + problem.spare
    numbers = _numbers(problem, order, pages)
    starts = accumulate(private, initial=together)
    return pages, [
        numbers[: count - own] + numbers[start : start + own]
        for count, own, start in zip(counts, private, starts, strict=False)
    ]


def rows_of_entry(problem: CacheProblem) -> int:
    """Returns the rows that an entry of a contiguous cache has."""
    return problem.attention.N + problem.spare or 1


def is_in_order(problem: CacheProblem) -> bool:
    """Returns whether pages, or entries of a contiguous cache, lie in the order of the table."""
    size, together = problem.page_size, problem.shared
    of_call, in_order = (
        _pages(x, size, together, 0)[1]
        for x in (problem, dataclasses.replace(problem, order="ascending"))
    )
    return of_call == in_order


def make_cache(
    problem: CacheProblem,
    inputs: Inputs,
    *,
    page_size: int | None = None,
    new: int | None = None,
    order: int | None = 0,
    is_shared: bool = True,
    fill: float = math.nan,
    wild: int = -1,
) -> CacheInputs:
    """Returns the tensors of a problem, with the keys and values of ``inputs`` in the cache.

    Caches of keys and values lie in one buffer, a page of each in turn, so that pages are further
    apart than their rows. Rows of the table are further apart than its places.

    Args:
        problem: The problem.
        inputs: The result of ``shared_inputs``.
        page_size: Rows of a page; None takes the problem's.
        new: Keys to append; None takes the problem's. The cache holds all others.
        order: Selects the order of pages: 0 is the problem's, and None is descending.
        is_shared: Whether entries share the problem's shared pages.
        fill: Value of all rows that hold no key.
        wild: Value of the places of the table past the last page of an entry.
    """
    page_size = problem.page_size if page_size is None else page_size
    new = problem.new if new is None else new
    a, seqlens, device = problem.attention, problem.seqlens, inputs.q.device
    is_paged = page_size > 0
    page_size = page_size or rows_of_entry(problem)
    together = problem.shared if is_shared and page_size == problem.page_size else 0
    pages, pages_of = _pages(problem, page_size if is_paged else 0, together, order)
    places = max(map(len, pages_of), default=0) + problem.spare
    rows = [x + [wild] * (places + 1 - len(x)) for x in pages_of]
    table = torch.tensor(rows, dtype=torch.int32).view(a.B, places + 1)
    columns = max(a.D, a.Dv)
    buffer = torch.full(
        (pages, 2, page_size, a.Hk, columns), fill, dtype=inputs.q.dtype, device=device
    )
    caches = buffer[:, 0, ..., : a.D], buffer[:, 1, ..., : a.Dv]
    # The entry and the number of each key in the cache. One copy for all of them, because a GPU
    # takes as long for one row as for many.
    held = torch.tensor([length - new for length in seqlens], dtype=torch.int64)
    entry, key = (torch.arange(a.N)[None, :] < held[:, None]).nonzero(as_tuple=True)
    page, row = table[entry, key // page_size].to(torch.int64), key % page_size
    entry, key, page, row = torch.stack([entry, key, page, row]).to(device)
    for cache, x in zip(caches, (inputs.k, inputs.v), strict=True):
        cache[page, row] = x[entry, :, key]
    added: list[torch.Tensor | None] = [None, None]
    if new:
        added = [
            torch.stack([x[b, :, length - new : length] for b, length in enumerate(seqlens)])
            for x in (inputs.k, inputs.v)
        ]
    lengths = held.to(device, torch.int32)
    table = table.to(device)
    return CacheInputs(
        inputs.q, *caches, added[0], added[1], lengths, table[:, :places] if is_paged else None,
        None if is_paged else table[:, 0].contiguous(), inputs.alibi_slopes, inputs.sinks,
    )  # fmt: skip
