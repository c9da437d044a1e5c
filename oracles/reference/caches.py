"""Caches in PyTorch: appends, and the keys that each entry holds."""

from __future__ import annotations

import torch

__all__ = ["appended", "gathered"]


def _places(table: torch.Tensor, page_size: int, n: torch.Tensor) -> torch.Tensor:
    """Returns the rows of keys n (B, keys) of each entry, numbered through all pages."""
    return table.to(torch.int64).gather(1, n // page_size) * page_size + n % page_size


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
    B, Hk, L, columns = new.shape
    if B * L:
        rows = before[:, None].to(torch.int64) + torch.arange(L, device=cache.device)
        places = _places(table, cache.shape[1], rows)
        kept.view(-1, Hk, columns)[places.flatten()] = new.transpose(1, 2).reshape(-1, Hk, columns)
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
            n = torch.arange(length, device=cache.device)[None]
            found[b, :length] = flat[_places(table[b : b + 1], cache.shape[1], n)[0]]
    return found.transpose(1, 2)
