"""The public function that attends to a cache of keys and values, and its validation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa_kernels.configs import MAX_SPLITS, Config
from fa_kernels.launch.call_cache import check, prepared
from fa_kernels.launch.portable import Cache, launch_append, launch_with_kvcache
from fa_kernels.runtime import allocation
from fa_kernels.validation.arguments import (
    MAX_HEAD_DIM,
    MAX_SEQLEN,
    MLA_HEAD_DIMS,
    MaskLike,
    Request,
    checked_lengths,
    lengths_on_device,
)

__all__ = ["MAX_PAGE_SIZE", "flash_attention_with_kvcache"]

MAX_PAGE_SIZE = 256
_NAME = "flash_attention_with_kvcache"


def flash_attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: int | Sequence[int] | torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    mask: MaskLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    sm_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    config: Config | str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of queries (B, H, M, D) to the keys and values that a cache holds.

    New keys and values are first written into the cache, in place, behind those that it holds.
    Query m then has position p = m + n_b - M, where n_b is the number of keys of entry b, new ones
    included. It sees the keys n with p - window_left <= n <= p + window_right, inclusive. A query
    that sees no key and no sink has out = 0 and lse = -inf.

    Rows of the cache past n_b, pages that no entry uses, and places of the table past an entry's
    last page are neither read nor written, whatever they hold.

    Args:
        q: (B, H, M, D), fp16, bf16, fp32 or float64, any strides. M can be 0.
        k_cache: (B, S, Hk, D), or pages (num_pages, page_size, Hk, D) with page_size 1 to 256. H is
            a multiple of Hk. The dtype and device of q, any strides.
        v_cache: As ``k_cache``, with Dv columns. D and Dv lie in [1, 256], or are 576 and 512. It
            can be a view of the first columns of ``k_cache``. New values then have to equal those
            columns of the new keys, and memory is read once if Dv is 512, or 128 with D = 192.
        k: (B, Hk, L, D), new keys, as in ``flash_attention``; dtype and device of q, any strides.
        v: (B, Hk, L, Dv), new values, given together with k.
        cache_seqlens: Keys that each entry holds before the call: an int, B ints, or an int32
            tensor (B,) on the device of q. The kernels clamp the values of a tensor to the places
            of an entry, and drop new keys that have no place. None is S, for a contiguous cache
            and no new keys.
        page_table: Int32 (B, places) on the device of q. Key n of entry b is row n % page_size of
            page ``page_table[b, n // page_size]``. Entries can share pages, if no entry appends to
            them. The kernels clamp the indices in use to [0, num_pages - 1].
        cache_batch_idx: Int32 (B,) on the device of q, the row of a contiguous cache of each entry.
            None is 0, 1, ..., B - 1.
        mask: As in ``flash_attention``, in place of causal and window_size. Its seqlens_q are None,
            and its seqlens_k the keys of each entry after the append; they are compared with ints
            in ``cache_seqlens``, not with a tensor. A mask with a predicate is evaluated for every
            key in the window, and for one head of queries a tile. Its N is the number of places of
            an entry.
        causal: Sets window_right to 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        softcap: As in ``flash_attention``.
        alibi_slopes: As in ``flash_attention``.
        sinks: As in ``flash_attention``; without a gradient.
        num_splits: None divides the keys into splits of ``split_keys`` of the configuration. Else 1
            to 256, the splits of the places of an entry: repeated calls give the same bits, and
            nothing more is promised.
        return_lse: Also return the log-sum-exp.
        config: Tile configuration, as in ``flash_attention``; its tile for caches is used, for any
            B and M. ``splits`` has to be None.

    Returns:
        out (B, H, M, Dv) in the dtype of q. With ``return_lse`` also lse (B, H, M), natural,
        float32 (float64 for float64). Neither is differentiable.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported.

    Numerics: as in the forward of ``flash_attention``, with a maximum and sums for each split.
    Splits and tiles of keys begin at fixed keys, and their sums are joined in ascending order,
    whether one program computes the splits or several. Pages, neighbours in the batch and the other
    queries of a call change no bit. The sink is taken after the last key.

    Source: ``flash_attn_with_kvcache`` of flash-attention for the semantics; PagedAttention
    (arXiv:2309.06180); Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
    """
    _check_tensors({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    new = _check_new(q, k_cache, v_cache, k, v)
    L = 0 if new is None else new[0].shape[2]
    cache = _cache(q, k_cache, v_cache, page_table, cache_batch_idx)
    B, D = q.shape[0], q.shape[3]
    # Stand-ins with the shapes of the keys and values that a table can lead to.
    one = allocation.empty((1,), dtype=q.dtype, device=q.device)
    keys, values = (
        one.expand(B, k_cache.shape[2], cache.capacity, columns)
        for columns in (D, v_cache.shape[3])
    )
    request = check(
        q,
        keys,
        values,
        mask=mask,
        causal=causal,
        window_size=window_size,
        seqlens_q=None,
        seqlens_k=None,
        sm_scale=sm_scale,
        deterministic=True,
        config=config,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cached=True,
    )
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        raise _not_differentiable("sinks")
    _check_splits(num_splits)
    arguments = prepared(q, keys, values, request, ())
    if arguments.config.splits is not None:
        raise NotImplementedError(
            f"config has splits={arguments.config.splits}; {_NAME} supports None, and takes "
            "num_splits"
        )
    ints, seqlens = _seqlens(
        cache_seqlens, q, cache, L, needed=new is not None or page_table is not None
    )
    if mask is not None:
        _check_lengths(request, None if ints is None else tuple(length + L for length in ints))
    if new is not None:
        launch_append(cache, *new, seqlens)
        seqlens = seqlens.clamp(0, cache.capacity) + L
    out, lse = launch_with_kvcache(q, cache, seqlens, arguments, num_splits)
    return (out, lse) if return_lse else out


def _check_tensors(tensors: dict[str, object]) -> None:
    """Checks types, layouts, axes, dtypes and devices, which are those of the first tensor.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A tensor has another number of axes, dtype or device.
        NotImplementedError: A tensor is not strided, or requires a gradient.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{_NAME} is traced by torch.compile; needs a call from outside, such as below "
            "torch.compiler.disable"
        )
    first: torch.Tensor | None = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; needs a torch.Tensor")
        if x.layout is not torch.strided:
            raise NotImplementedError(f"{name} has layout {x.layout}; needs a strided tensor")
        if x.ndim != 4:
            axes = "(B, H, M, D)" if name == "q" else "(B, S, Hk, D) or (pages, page_size, Hk, D)"
            axes = "(B, Hk, L, D)" if name in ("k", "v") else axes
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs four axes {axes}")
        first = x if first is None else first
        if x.dtype != first.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; needs that of q, {first.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}; needs the device of q, {first.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise _not_differentiable(name)


def _not_differentiable(name: str) -> NotImplementedError:
    """Returns the error of an argument that requires a gradient."""
    return NotImplementedError(
        f"{name} requires a gradient; {_NAME} is not differentiable: call it under torch.no_grad()"
    )


def _check_splits(num_splits: object) -> None:
    """Checks the number of splits.

    Raises:
        TypeError: It is no int.
        ValueError: It is out of range.
    """
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits is {num_splits!r}; needs an int or None")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; needs an int in [1, {MAX_SPLITS}]")


def _check_new(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Checks the shapes of the caches and of new keys and values; returns (k, v) or None.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes or devices do not match.
        NotImplementedError: A head_dim or a tensor is not supported.
    """
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}; needs the pages, rows and heads of "
            f"k_cache, {tuple(k_cache.shape)}"
        )
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache has head_dim {k_cache.shape[3]}; needs that of q, {q.shape[3]}")
    if k_cache.shape[2] < 1:
        raise ValueError("k_cache has 0 heads; needs at least 1")
    if v_cache.shape[3] < 1:
        raise ValueError("v_cache has head_dim 0; needs at least 1")
    is_mla = (q.shape[3], v_cache.shape[3]) == MLA_HEAD_DIMS
    if v_cache.shape[3] > MAX_HEAD_DIM and not is_mla:
        raise NotImplementedError(
            f"v_cache has head_dim {v_cache.shape[3]}; supported are 1 to {MAX_HEAD_DIM}"
        )
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{given} is given without {missing}; needs both or neither")
    if k is None or v is None:
        return None
    _check_tensors({"q": q, "k": k, "v": v})
    B, Hk, L = q.shape[0], k_cache.shape[2], k.shape[2]
    for name, x, columns in (("k", k, k_cache.shape[3]), ("v", v, v_cache.shape[3])):
        if tuple(x.shape) != (B, Hk, L, columns):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; needs {(B, Hk, L, columns)}, by q, k and "
                f"{name}_cache"
            )
    return k, v


def _check_ints(name: str, x: object, q: torch.Tensor, axes: tuple[str, ...]) -> None:
    """Checks an int32 tensor on the device of q, whose first axis is the batch.

    Raises:
        TypeError: It is no int32 tensor.
        ValueError: Its shape or device does not match q.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; needs an int32 torch.Tensor")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; needs torch.int32")
    B = q.shape[0]
    if x.ndim != len(axes) or x.shape[0] != B:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; needs ({', '.join(axes)}) with B = {B}"
        )
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")


def _cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
) -> Cache:
    """Returns the caches with a page table, where a contiguous entry is one page.

    Raises:
        TypeError: A table is no int32 tensor.
        ValueError: Tables and caches contradict each other.
        NotImplementedError: Pages or entries are too long.
    """
    B = q.shape[0]
    pages, page_size = k_cache.shape[:2]
    if page_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is given together with page_table; needs one of them")
        _check_ints("page_table", page_table, q, ("B", "places"))
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise NotImplementedError(
                f"k_cache has pages of {page_size} rows; supported are 1 to {MAX_PAGE_SIZE}"
            )
        table = page_table
    elif cache_batch_idx is not None:
        _check_ints("cache_batch_idx", cache_batch_idx, q, ("B",))
        table = cache_batch_idx[:, None]
    else:
        if pages != B:
            raise ValueError(f"k_cache has batch size {pages}; needs that of q, {B}")
        table = lengths_on_device(tuple(range(B)), q.device)[:, None]
    # Entries without any page have no place, whatever the table says.
    capacity = table.shape[1] * page_size if pages or not B else 0
    if capacity > MAX_SEQLEN:
        raise NotImplementedError(
            f"k_cache has places for {capacity} keys of an entry; supported are up to {MAX_SEQLEN}"
        )
    return Cache(k_cache, v_cache, table, capacity, page_table is not None)


def _seqlens(
    cache_seqlens: int | Sequence[int] | torch.Tensor | None,
    q: torch.Tensor,
    cache: Cache,
    L: int,
    *,
    needed: bool,
) -> tuple[tuple[int, ...] | None, torch.Tensor]:
    """Returns the keys of each entry before the call, as ints if they are known, and on the device.

    The tensor is int32 (B,), on the device of q.

    Raises:
        TypeError: ``cache_seqlens`` has the wrong type.
        ValueError: It is missing or out of range.
    """
    B = q.shape[0]
    if cache_seqlens is None:
        if needed:
            raise ValueError(
                "cache_seqlens is None; needs the keys of each entry, as k or page_table is given"
            )
        cache_seqlens = cache.capacity
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        cache_seqlens = (cache_seqlens,) * B
    room = cache.capacity - L
    if room < 0:
        raise ValueError(f"k has {L} keys; an entry of the cache has places for {cache.capacity}")
    tensor, ints = checked_lengths("cache_seqlens", cache_seqlens, B, room, q.device)
    if tensor is not None:
        return None, tensor
    assert ints is not None
    return ints, lengths_on_device(ints, q.device)


def _check_lengths(request: Request, seqlens_k: tuple[int, ...] | None) -> None:
    """Checks the lengths of a mask against the keys of each entry, if these are known.

    Raises:
        ValueError: The mask has lengths of queries, no lengths of keys or others, or tensors.
    """
    if request.seqlens_q is not None or request.lengths_q is not None:
        raise ValueError(f"mask has seqlens_q; needs None, as all queries of {_NAME} are valid")
    if request.lengths_k is None:
        raise ValueError("mask has no ints as seqlens_k; needs the keys of each entry")
    if seqlens_k is not None and tuple(request.lengths_k) != seqlens_k:
        raise ValueError(
            f"mask has seqlens_k={tuple(request.lengths_k)}; needs {seqlens_k}, the keys of each "
            "entry by cache_seqlens and k"
        )
