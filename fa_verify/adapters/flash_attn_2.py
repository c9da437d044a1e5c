"""FlashAttention-2, ``flash_attn``, which takes (B, M, H, D): padded, packed, and with a cache.

A cache in pages has pages of a multiple of 256 rows.
"""

from __future__ import annotations

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["attention"]


def _window(left, right):
    return tuple(-1 if x is None else x for x in (left, right))


def _of_mask(mask, sm_scale, beside):
    return {
        "softmax_scale": sm_scale, "causal": mask.causal,
        "window_size": _window(mask.window_left, mask.window_right), **beside,
    }  # fmt: skip


def attention(q, k, v, *, mask, sm_scale, **beside):
    """FlashAttention-2, with causal masks and windows aligned at the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given = _of_mask(mask, sm_scale, beside)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    return out.transpose(1, 2), lse


def packed(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale, **beside
):
    """Packed sequences."""
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_attn_probs=True,
        **_of_mask(mask, sm_scale, beside),
    )  # fmt: skip
    return out, lse


def cached(
    q, k_cache, v_cache, *, k=None, v=None, cache_seqlens, page_table, cache_batch_idx, causal,
    window_size, sm_scale, **beside,
):  # fmt: skip
    """A cache, contiguous or in pages, to which new keys are appended."""
    new = (None if x is None else x.transpose(1, 2) for x in (k, v))
    out, lse = flash_attn_with_kvcache(
        q.transpose(1, 2), k_cache, v_cache, *new, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, block_table=page_table, softmax_scale=sm_scale,
        causal=causal, window_size=_window(*window_size), return_softmax_lse=True, **beside,
    )  # fmt: skip
    return out.transpose(1, 2), lse


attention.packed = packed
attention.kvcache = cached
attention.page_sizes = (256, 512)
# With num_splits=0 a heuristic takes up to 128.
attention.kvcache_splits = lambda problem: 128
attention.devices = ("cuda",)
attention.dtypes = ("fp16", "bf16")
attention.head_dims = (32, 64, 128)
attention.dv_ne_d = False
attention.masks = ("causal", "window")
attention.score_mods = ("softcap", "alibi")
attention.returns_lse = True
attention.empty_lse = "+inf"
attention.atomic = ("dq",)
# Gradients of a group of heads are stored for each head, and then added.
attention.group_sum = "dtype"
# Compiled with fast-math flags.
attention.flushes = True
