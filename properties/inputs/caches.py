"""The tensors of a call with a cache: its pages, the page table, and new keys and values."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import NamedTuple

import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.in_torch import encoded
from fa_verify.oracles.stream import uniform
from fa_verify.properties.inputs.stored import Scales, codes_of, scales_of, stored_inputs
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
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


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
        k_scale: The scales of a cache of codes, float32: (1,), (Hk,), (pages, Hk) or (pages,
            page_size, Hk); else None.
        v_scale: As ``k_scale``.
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
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def writes_scales(self) -> bool:
        """Whether the call makes scales of the tokens that it appends."""
        return self.k is not None and self.k_scale is not None and self.k_scale.ndim == 3

    @property
    def without_caches(self) -> UnchangedInputs:
        """The tensors that the call must not write to."""
        given = self._asdict()
        if self.writes_scales:
            given |= {"k_scale": None, "v_scale": None}
        return UnchangedInputs(**{name: given[name] for name in UnchangedInputs._fields})

    @property
    def table(self) -> torch.Tensor:
        """The pages of each entry; one for an entry of a contiguous cache."""
        if self.page_table is not None:
            return self.page_table
        assert self.cache_batch_idx is not None
        return self.cache_batch_idx[:, None]


def shared_inputs(problem: CacheProblem) -> Inputs:
    """Returns the tensors of the attention, where entries agree in the pages that they share.

    Keys and values of a cache of codes are float64, and those of codes times scales.
    """
    inputs = make(problem.attention)
    rows = problem.shared * problem.page_size
    if rows and len(inputs.k) > 1:
        k, v = (x.clone() for x in (inputs.k, inputs.v))
        for x in (k, v):
            x[1:, :, :rows] = x[:1, :, :rows].clone()
        inputs = inputs._replace(k=k, v=v)
    return stored_inputs(problem, inputs)


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
    columns, form = max(a.D, a.Dv), problem.format
    buffer = torch.full(
        (pages, 2, page_size, a.Hk, columns), fill, dtype=inputs.q.dtype, device=device
    )
    numbers, scales = (inputs.k, inputs.v), None
    if form is not None:
        buffer = _filled(buffer.shape, fill, form, device)
        scales = scales_of(problem)
        codes = (codes_of(problem, *x).view(torch.uint8) for x in zip(numbers, scales, strict=True))
        numbers = next(codes), next(codes)
    caches = buffer[:, 0, ..., : a.D], buffer[:, 1, ..., : a.Dv]
    # The entry and the number of each key in the cache. One copy for all of them, because a GPU
    # takes as long for one row as for many.
    held = torch.tensor([length - new for length in seqlens], dtype=torch.int64)
    entry, key = (torch.arange(a.N)[None, :] < held[:, None]).nonzero(as_tuple=True)
    page, row = table[entry, key // page_size].to(torch.int64), key % page_size
    entry, key, page, row = torch.stack([entry, key, page, row]).to(device)
    for cache, x in zip(caches, numbers, strict=True):
        cache[page, row] = x[entry, :, key]
    of_call: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if form is not None and scales is not None:
        caches = caches[0].view(form.dtype), caches[1].view(form.dtype)
        shape = pages, page_size, a.Hk
        of_call = _scale_tensors(problem.scales, scales, (page, row, entry, key), shape, fill)
    added: list[torch.Tensor | None] = [None, None]
    if new:
        added = [
            torch.stack(
                [
                    _as_input(x[b, :, length - new : length], inputs.q)
                    for b, length in enumerate(seqlens)
                ]
            )
            for x in (inputs.k, inputs.v)
        ]
    lengths = held.to(device, torch.int32)
    table = table.to(device)
    return CacheInputs(
        inputs.q, *caches, added[0], added[1], lengths, table[:, :places] if is_paged else None,
        None if is_paged else table[:, 0].contiguous(), inputs.alibi_slopes, inputs.sinks, *of_call,
    )  # fmt: skip


def _as_input(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns new keys in the dtype of q, where the largest number of float64 is that of q."""
    largest = torch.finfo(q.dtype).max
    return x if x.dtype == q.dtype else x.clamp(-largest, largest).to(q.dtype)


def _filled(
    shape: torch.Size, fill: float, form: ElementFormat, device: torch.device
) -> torch.Tensor:
    """Returns the codes of a number as bytes; an integer that stands for NaN is the least."""
    number = torch.tensor(fill, dtype=torch.float64)
    if form.nan_code is None:
        number = number.nan_to_num(nan=-math.inf)
    code = int(encoded(number[None], form).view(torch.uint8))
    return torch.full(shape, code, dtype=torch.uint8, device=device)


def _scale_tensors(
    scales: str,
    of_keys: Scales,
    places: tuple[torch.Tensor, ...],
    shape: tuple[int, int, int],
    fill: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales of keys and of values as they lie in memory.

    Scales of pages and tokens of keys and of values lie in one buffer, as the caches do, and
    ``fill`` is in those of places without a key.

    Args:
        scales: One of ``SCALES``.
        of_keys: The scales by entry, head and key.
        places: The page, row, entry and key of all keys in the cache.
        shape: Pages, rows of a page, and heads.
        fill: A number.
    """
    page, row, entry, key = places
    pages, rows, heads = shape
    k, v = of_keys
    if scales in ("tensor", "head"):
        # A call without an entry or a key has them, too.
        of_head = slice(1 if scales == "tensor" else heads)
        found = [
            x[0, of_head, 0].clone() if x.numel() else x.new_ones(heads)[of_head] for x in (k, v)
        ]
    elif scales == "page":
        buffer = k.new_full((pages, 2, heads), fill)
        for i, x in enumerate((k, v)):
            buffer[page, i] = x[entry, :, key]
        found = [buffer[:, 0], buffer[:, 1]]
    else:
        buffer = k.new_full((pages, 2, rows, heads), fill)
        for i, x in enumerate((k, v)):
            buffer[page, i, row] = x[entry, :, key]
        found = [buffer[:, 0], buffer[:, 1]]
    return found[0], found[1]
