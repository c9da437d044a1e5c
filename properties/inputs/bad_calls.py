"""Bad calls, each a good one with some arguments changed, which a kernel may promise to refuse.

Each docstring names what a kernel computes, silently, that does not look. Reads stay within the
tensors where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fa_verify.oracles.masks.mask import Mask

__all__ = ["BAD_CALLS", "OF_ALL", "OF_CACHES", "OF_PACKED", "OF_PADDED", "Arguments", "Change"]

# Arguments of a call by name: q; k and v, or k_cache and v_cache; and the keyword arguments.
Arguments = Mapping[str, Any]
# Returns the changed arguments; None where the machine or the call has no such bad call.
Change = Callable[[Arguments], dict[str, Any] | None]
_HEADS = 3, 2


def _keys(given: Arguments) -> dict[str, torch.Tensor]:
    """Return the tensors of keys and of values, the new ones of a cache too, by name."""
    names = ("k_cache", "v_cache", "k", "v")
    return {name: given[name] for name in names if given.get(name) is not None}


def _keys_and_values(given: Arguments) -> tuple[str, str]:
    return ("k_cache", "v_cache") if "k_cache" in given else ("k", "v")


def heads_not_divisible(given: Arguments) -> dict[str, Any]:
    """3 query heads and 2 key/value heads: a group of 3 // 2 heads reads past the last head."""

    def with_heads(x: torch.Tensor, axis: int, count: int) -> torch.Tensor:
        return torch.cat([x.narrow(axis, 0, 1)] * count, axis)

    axes = {"k_cache": 2, "v_cache": 2}
    queries, keys = _HEADS
    return {"q": with_heads(given["q"], 1, queries)} | {
        name: with_heads(x, axes.get(name, 1), keys) for name, x in _keys(given).items()
    }


def head_dims_differ(given: Arguments) -> dict[str, Any]:
    """K of twice the D of q: the columns past D are left out."""
    return {name: torch.cat([x, x], -1) for name, x in _keys(given).items() if name[0] == "k"}


def lengths_differ(given: Arguments) -> dict[str, Any]:
    """V of twice the rows of k: the rows past N are left out."""
    name = _keys_and_values(given)[1]
    x = given[name]
    axis = 1 if name == "v_cache" else 2 * (x.ndim == 4)
    return {name: torch.cat([x, x], axis)}


def batch_differs(given: Arguments) -> dict[str, Any]:
    """One entry more in k and v, or in the lengths of keys: it is left out."""
    for name in ("cu_seqlens_k", "cache_seqlens"):
        if name in given:
            return {name: torch.cat([given[name], given[name][-1:]])}
    return {name: torch.cat([x, x[-1:]]) for name, x in _keys(given).items()}


def dtypes_differ(given: Arguments) -> dict[str, Any]:
    """K and v of another dtype than q: a product converts one, or reads bits of the other."""
    other = torch.float16 if given["q"].dtype == torch.bfloat16 else torch.bfloat16
    return {name: x.to(other) for name, x in _keys(given).items()}


def devices_differ(given: Arguments) -> dict[str, Any] | None:
    """K and v on the CPU beside a q on a GPU, which a driver may read slowly, or not at all."""
    if given["q"].device.type == "cpu":
        return None
    return {name: x.cpu() for name, x in _keys(given).items()}


def too_many_keys(given: Arguments) -> dict[str, Any]:
    """Lengths of N + 1 keys: a key of the next head is read."""
    B, N = given["k"].shape[0], given["k"].shape[2]
    return {"mask": Mask(causal=given["mask"].causal, seqlens_k=(N + 1,) * B)}


def wrong_bias_shape(given: Arguments) -> dict[str, Any]:
    """A bias of N + 1 columns: rows after the first are read a column late, or one is left out."""
    q, N = given["q"], given["k"].shape[2]
    return {"bias": torch.zeros(1, 1, q.shape[2], N + 1, dtype=q.dtype, device=q.device)}


def decreasing_offsets(given: Arguments) -> dict[str, Any]:
    """Offsets of keys of which the second is larger than the third: a sequence counts as empty."""
    order = [0, 2, 1, *range(3, len(given["cu_seqlens_k"]))]
    return {"cu_seqlens_k": given["cu_seqlens_k"][order]}


def offsets_past_the_end(given: Arguments) -> dict[str, Any]:
    """A last offset of total_k + 1: a row past the last one is read."""
    offsets = given["cu_seqlens_k"].clone()
    offsets[-1] += 1
    return {"cu_seqlens_k": offsets}


def negative_lengths(given: Arguments) -> dict[str, Any]:
    """An entry of the cache with -1 keys: it counts as empty, or positions are shifted."""
    lengths = given["cache_seqlens"].clone()
    lengths[0] = -1
    return {"cache_seqlens": lengths}


def cache_too_long(given: Arguments) -> dict[str, Any]:
    """One key more than an entry has rows: those of another entry or page are read or written."""
    table, new = given.get("page_table"), given.get("k")
    rows = given["k_cache"].shape[1] * (1 if table is None else table.shape[1])
    lengths = given["cache_seqlens"].clone()
    lengths[0] = rows + 1 - (0 if new is None else new.shape[2])
    # Every place of the table leads to a page.
    tables = {} if table is None else {"page_table": table.clamp(min=0)}
    return {"cache_seqlens": lengths, **tables}


def page_out_of_range(given: Arguments) -> dict[str, Any] | None:
    """The number of a page that the cache does not have: memory past the cache is read."""
    if given.get("page_table") is None:  # a contiguous cache
        return None
    table = given["page_table"].clone()
    table[0, 0] = len(given["k_cache"])
    return {"page_table": table}


def _named(*changes: Change) -> dict[str, Change]:
    return {change.__name__.replace("_", " "): change for change in changes}


# By the form of the calls: of every form, of padded tensors, of packed sequences, with a cache.
OF_ALL = _named(
    heads_not_divisible, head_dims_differ, lengths_differ, batch_differs, dtypes_differ,
    devices_differ,
)  # fmt: skip
OF_PADDED = _named(too_many_keys, wrong_bias_shape)
OF_PACKED = _named(decreasing_offsets, offsets_past_the_end)
OF_CACHES = _named(negative_lengths, cache_too_long, page_out_of_range)
BAD_CALLS = tuple({**OF_ALL, **OF_PADDED, **OF_PACKED, **OF_CACHES})
