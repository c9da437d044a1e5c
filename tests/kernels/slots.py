"""Keys in pages: of padded tensors, and as kernels see them that read a table of slots."""

import torch


def slots(cache):
    """Return pages (pages, rows, Hk, D) as slots (slots, Hk, D), without a copy."""
    step, per_page = _steps(cache)
    count = (len(cache) - 1) * per_page + cache.shape[1]
    return cache.as_strided((count, *cache.shape[2:]), (step, *cache.stride()[2:]))


def _steps(cache):
    """Return the elements of a slot, and the slots from one page to the next."""
    # The stride of an axis of one row says nothing.
    step = cache.stride(1) if cache.shape[1] > 1 else cache.stride(0)
    return step, cache.stride(0) // step


def slots_of(k_cache, v_cache, table, length):
    """Return the slots of the first keys of each entry, int64 (B, length).

    Raises:
        NotImplementedError: A key does not lie in the slot of its value.
    """
    (_, per_page), (_, per_page_of_v) = _steps(k_cache), _steps(v_cache)
    if per_page != per_page_of_v:
        raise NotImplementedError("a key and its value have the same slot")
    keys, rows = torch.arange(length, device=table.device), k_cache.shape[1]
    return table.long()[:, keys // rows] * per_page + keys % rows


def reversed_pages(k, v, rows, mask):
    """Return padded k and v in pages in reverse order, their table, and the lengths."""
    B, Hk, S, _ = k.shape
    count = -(-S // rows)
    pages = [
        torch.nn.functional.pad(x, (0, 0, 0, count * rows - S))
        .transpose(1, 2)
        .reshape(B * count, rows, Hk, -1)
        .flip(0)
        .contiguous()
        for x in (k, v)
    ]
    table = torch.arange(B * count, dtype=torch.int32, device=k.device).flip(0).view(B, count)
    lengths = torch.tensor(mask.lengths(B, 1, S)[1], dtype=torch.int32, device=k.device)
    return pages, table, lengths
