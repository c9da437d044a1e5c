"""Caches in PyTorch: appends, and the keys that each entry holds."""

from __future__ import annotations

import torch

__all__ = ["appended", "gathered"]


def _places(table: torch.Tensor, page_size: int, n: torch.Tensor, b: int) -> torch.Tensor:
    """Returns the rows of keys n of an entry, numbered through all pages."""
    return table[b].to(torch.int64)[n // page_size] * page_size + n % page_size


def appended(
    cache: torch.Tensor, new: torch.Tensor, before: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Returns a contiguous copy of a cache, with new rows behind those of each entry.

    Args:
        cache: (pages, page_size, Hk, columns); a contiguous cache has pages as long as an entry.
        new: (B, Hk, L, columns).
        before: Int (B,), the rows that each entry holds.
        table: Int (B, places), the pages of each entry.
    """
    kept = cache.clone(memory_format=torch.contiguous_format)
    flat = kept.view(-1, *kept.shape[2:])
    steps = torch.arange(new.shape[2], device=cache.device)
    for b in range(len(new)):
        if len(steps):
            flat[_places(table, cache.shape[1], before[b] + steps, b)] = new[b].transpose(0, 1)
    return kept


def gathered(
    cache: torch.Tensor, seqlens: torch.Tensor, table: torch.Tensor, N: int
) -> torch.Tensor:
    """Returns the rows that each entry holds, (B, Hk, N, columns), and zeros past them.

    Args:
        cache: (pages, page_size, Hk, columns).
        seqlens: Int (B,), at most N.
        table: Int (B, places).
        N: Rows of the result.
    """
    flat = cache.reshape(-1, *cache.shape[2:])
    found = cache.new_zeros((len(table), N, *cache.shape[2:]))
    for b, length in enumerate(seqlens.tolist()):
        if length:
            n = torch.arange(length, device=cache.device)
            found[b, :length] = flat[_places(table, cache.shape[1], n, b)]
    return found.transpose(1, 2)
