"""The dense kernels of native-sparse-attention-triton. They have block pointers."""

import torch
from brought import importable

from fa_verify import attention_kernel

importable(
    "XunhaoLai/native-sparse-attention-triton",
    "native_sparse_attention/ops/triton/flash_attention.py",
)
from native_sparse_attention.ops.triton.flash_attention import flash_attention_varlen
from native_sparse_attention.ops.triton.flash_attention_decode import flash_attention_decode

ours = {"dtypes": ("fp16", "bf16"), "zero_sizes": False}


@attention_kernel(
    **ours, varlen=True, masks=("causal", "padding"), m_ne_n=False, block_n=64,
    group_sum="dtype", ds_scaled=True, backward_reads=("out", "lse"),
)  # fmt: skip
def prefill(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale):
    """flash_attention_varlen."""
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError("each sequence has as many queries as keys")
    return flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask.causal, sm_scale
    )


@attention_kernel(
    **ours, one_query=True, backward=False, masks=("padding",), dv_ne_d=False, block_n=128
)
def decode(q, k, v, *, mask, sm_scale):
    """flash_attention_decode: one query, and keys (B, S, Hk, D) with their numbers."""
    B, _, S, _ = k.shape
    lengths = torch.tensor(mask.lengths(B, 1, S)[1], dtype=torch.int32, device=q.device)
    k, v = (x.transpose(1, 2) for x in (k, v))
    return flash_attention_decode(q[:, :, 0], k, v, lengths, sm_scale).unsqueeze(2)
