"""lmdeploy's packed prefill kernel, flash_attn_varlen_func. It has block pointers."""

import logging

from brought import importable, stand_in

from fa_verify import attention_kernel

importable("InternLM/lmdeploy", "lmdeploy/pytorch/kernels/cuda/flashattention.py")
stand_in("lmdeploy.utils", get_logger=logging.getLogger)
from lmdeploy.pytorch.kernels.cuda.flashattention import flash_attn_varlen_func


@attention_kernel(
    varlen=True, backward=False, devices=("cuda",), dtypes=("fp16", "bf16"), m_gt_n=False,
    masks=("causal", "padding"), zero_sizes=False, head_dims=(32, 64, 96, 128), dv_ne_d=False,
    block_n=32,
)  # fmt: skip
def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale):
    """Attend with keys of shape (total, heads, dim)."""
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=sm_scale, causal=mask.causal, kv_layout="shd",
    )  # fmt: skip
