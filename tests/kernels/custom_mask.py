"""flashattention2-custom-mask, which takes a mask of every pair. It has block pointers."""

import torch
from brought import importable

from fa_verify import attention_kernel

importable("alexzhang13/flashattention2-custom-mask", "fa2_custom_mask/fa2_custom_mask.py")
from fa2_custom_mask.fa2_custom_mask import flash_attention_custom_mask


@attention_kernel(
    devices=("cuda",), dtypes=("fp16", "fp32"), head_dims=(64, 128), seqlen_multiple=128,
    gqa=False, m_ne_n=False, dv_ne_d=False, zero_sizes=False, layouts=("bhsd",), prescales="k",
    masks=("causal", "window", "padding", "custom"),
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Pass the dense mask, as in the example of its README."""
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device).to(torch.int32)
    return flash_attention_custom_mask(q, k, v, seen.contiguous(), sm_scale)
