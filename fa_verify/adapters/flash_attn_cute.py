"""FlashAttention-4, ``flash_attn.cute``, which takes (B, M, H, D) and returns (out, lse).

Sequence lengths need another function, on tensors without padding or on pages, so padding is not
declared.
"""

from __future__ import annotations

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

__all__ = ["attention"]


def attention(q, k, v, *, mask, sm_scale):
    """FlashAttention-4, with causal masks and windows aligned at the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    window = (mask.window_left, mask.window_right)
    out, lse = flash_attn_func(
        q, k, v, softmax_scale=sm_scale, causal=mask.causal, window_size=window, return_lse=True
    )
    return out.transpose(1, 2), lse


def packed(q, k, v, *, mask, sm_scale, **offsets):
    """Packed sequences, of which ``offsets`` has cu_seqlens and maximal lengths."""
    window = (mask.window_left, mask.window_right)
    return flash_attn_varlen_func(
        q, k, v, **offsets, softmax_scale=sm_scale, causal=mask.causal, window_size=window,
        return_lse=True,
    )  # fmt: skip


def cached(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, causal, window_size, sinks=None
):
    """A cache in pages."""
    out, lse = flash_attn_varlen_func(
        q.transpose(1, 2), k_cache, v_cache, seqused_k=cache_seqlens, page_table=page_table,
        softmax_scale=sm_scale, causal=causal, window_size=window_size, learnable_sink=sinks,
        return_lse=True,
    )  # fmt: skip
    return out.transpose(1, 2), lse


attention.packed = packed
attention.kvcache = cached
attention.cache = ("paged",)
# Pages as long as a tile of keys are read by other instructions than shorter ones.
attention.page_sizes = (16, 128)
attention.devices = ("cuda",)
attention.dtypes = ("fp16", "bf16")
# Each pair of head_dims is compiled separately.
attention.head_dims = (64, 128)
# For D = 64 and Dv = 128, CUDA refuses the launch on an H200.
attention.dv_ne_d = False
attention.masks = ("causal", "window")
attention.returns_lse = True
attention.lse_grad = True
# Compiled with fast-math flags.
attention.flushes = True
