"""Caches in NumPy, row by row: a second writing of ``caches.py``, which shares no code with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["appended", "gathered"]

Array = NDArray[Any]


def appended(cache: Array, new: Array, before: Array, table: Array) -> Array:
    """Returns a copy of a cache with new rows behind those of each entry, as ``caches`` does."""
    page_size = cache.shape[1]
    kept = cache.copy()
    for b, rows in enumerate(new):
        n = int(before[b])
        for i in range(rows.shape[1]):
            page, row = divmod(n + i, page_size)
            kept[table[b, page], row] = rows[:, i]
    return kept


def gathered(cache: Array, seqlens: Array, table: Array, N: int) -> Array:
    """Returns the rows that each entry holds, and zeros past them; see ``caches.gathered``."""
    page_size, Hk, columns = cache.shape[1:]
    found = np.zeros((len(table), Hk, N, columns), cache.dtype)
    for b, length in enumerate(seqlens):
        n = 0
        for page in table[b]:
            if n >= length:
                break
            rows = cache[page, : min(page_size, int(length) - n)]
            found[b, :, n : n + len(rows)] = rows.swapaxes(0, 1)
            n += len(rows)
    return found
