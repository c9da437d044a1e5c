"""FlashAttention-4, ``flash_attn.cute``, which takes (B, M, H, D) and returns (out, lse).

Sequence lengths need another function, on tensors without padding, so padding is not declared.
"""

from __future__ import annotations

from flash_attn.cute import flash_attn_func

__all__ = ["attention"]


def attention(q, k, v, *, mask, sm_scale):
    """FlashAttention-4, with causal masks and windows aligned at the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    window = (mask.window_left, mask.window_right)
    out, lse = flash_attn_func(
        q, k, v, softmax_scale=sm_scale, causal=mask.causal, window_size=window, return_lse=True
    )
    return out.transpose(1, 2), lse


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
