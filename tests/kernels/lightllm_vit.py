"""lightllm's kernel for packed images: no mask, and as many keys as queries."""

import torch
from brought import importable, stand_in

from fa_verify import attention_kernel

importable("ModelTC/lightllm", "lightllm/models/vit/triton_kernel/flashattention_nopad.py")
stand_in("lightllm.utils.device_utils", is_tesla=lambda: False, is_hopper=lambda: False)
from lightllm.models.vit.triton_kernel import flashattention_nopad as kernels


@attention_kernel(
    varlen=True, backward=False, fixed_scale="1/sqrt(D)", masks=("padding",), m_ne_n=False,
    dtypes=("fp16", "bf16"), gqa=False, dv_ne_d=False, zero_sizes=False, block_n=64,
)  # fmt: skip
def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask):
    """Attend within each image."""
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError("it takes one cu_seqlens, of queries and keys")
    out = torch.empty_like(q)
    kernels.flash_attention_fwd(q, k, v, out, cu_seqlens_q, max_seqlen_q)
    return out
