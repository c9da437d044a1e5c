"""FlashInfer's wrappers of kernels that read pages, with logarithms in base 2.

A wrapper is planned for each call. Keys and values need the same strides.
"""

from __future__ import annotations

import functools

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch.nn.functional import pad

from fa_verify.properties.kernels.attention_kernel import attention_kernel

__all__ = ["decode", "prefill"]

paged = {
    "cache": ("paged",), "page_sizes": (1, 16, 64), "masks": ("causal", "window"),
    "dtypes": ("fp16", "bf16"), "head_dims": (64, 128), "dv_ne_d": False, "zero_sizes": False,
    "m_gt_n": False, "devices": ("cuda",), "score_mods": ("softcap",), "lse_base": "2",
    "returns_lse": True, "flushes": True, "splits": 128,
}  # fmt: skip


@functools.cache
def _workspace(device):
    return torch.zeros(128 * 2**20, dtype=torch.uint8, device=device)


def _pages(k_cache, v_cache, lengths, table):
    """Return the offsets of entries among the pages in use, those pages, and the last lengths."""
    if k_cache.stride() != v_cache.stride():
        raise NotImplementedError("keys and values have the same strides")
    rows = k_cache.shape[1]
    counts = (lengths + (rows - 1)) // rows
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return pad(counts.cumsum(0).int(), (1, 0)), table[used], lengths - (counts - 1) * rows


def _plan(q, sm_scale, window_size, softcap):
    left, right = window_size
    if right:
        raise NotImplementedError("a window ends at the diagonal, or nowhere")
    return {
        "q_data_type": q.dtype, "kv_data_type": q.dtype, "sm_scale": sm_scale,
        "window_left": -1 if left is None else left, "logits_soft_cap": softcap,
    }  # fmt: skip


@attention_kernel(**paged, one_query=True, always_causal=True)
def decode(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, window_size, softcap=None
):  # fmt: skip
    """BatchDecodeWithPagedKVCacheWrapper."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        *_pages(k_cache, v_cache, cache_seqlens, page_table), q.shape[1], k_cache.shape[2],
        q.shape[3], k_cache.shape[1], **_plan(q, sm_scale, window_size, softcap),
    )  # fmt: skip
    out, lse = wrapper.run(q[:, :, 0].contiguous(), (k_cache, v_cache), return_lse=True)
    return out.unsqueeze(2), lse.unsqueeze(2)


@attention_kernel(**paged)
def prefill(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, causal, window_size, softcap=None
):
    """BatchPrefillWithPagedKVCacheWrapper."""
    B, H, M, D = q.shape
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        torch.arange(B + 1, dtype=torch.int32, device=q.device) * M,
        *_pages(k_cache, v_cache, cache_seqlens, page_table), H, k_cache.shape[2], D,
        k_cache.shape[1], causal=causal, **_plan(q, sm_scale, window_size, softcap),
    )  # fmt: skip
    packed = q.transpose(1, 2).reshape(B * M, H, D)
    out, lse = wrapper.run(packed, (k_cache, v_cache), return_lse=True)
    return tuple(x.unflatten(0, (B, M)).transpose(1, 2) for x in (out, lse))
