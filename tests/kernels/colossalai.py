"""ColossalAI's paged decoding and its prefill, which writes pages. They have block pointers."""

import torch
from brought import module

from fa_verify import attention_kernel

context = module("hpcaitech/ColossalAI", "colossalai/kernel/triton/context_attn_unpad.py")
decoding = module("hpcaitech/ColossalAI", "colossalai/kernel/triton/flash_decoding.py")
PAGE = 16
ours = {"dtypes": ("fp16", "bf16"), "head_dims": (32, 64, 128, 256), "zero_sizes": False}


@attention_kernel(
    **ours, cache=("paged",), masks=("causal",), always_causal=True, m_gt_n=False, dv_ne_d=False,
    page_sizes=(16, 32, 64, 128), splits=64,
)  # fmt: skip
def decode(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale):
    """flash_decoding_attention, with several queries as it verifies drafts."""
    (B, H, M, D), (_, rows, Hk, _) = q.shape, k_cache.shape
    packed = q.transpose(1, 2).reshape(B * M, H, D)
    out = decoding.flash_decoding_attention(
        packed, k_cache.transpose(1, 2), v_cache.transpose(1, 2), cache_seqlens, page_table,
        rows, sm_scale=sm_scale, kv_group_num=H // Hk, q_len=M,
    )  # fmt: skip
    return out.view(B, M, H, D).transpose(1, 2)


@attention_kernel(
    **ours, varlen=True, always_causal=True, masks=("causal", "padding"), m_ne_n=False,
    dv_ne_d=False, backward=False, block_n=PAGE,
)  # fmt: skip
def prefill(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale):
    """context_attention_unpadded, with pages of 16 tokens."""
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError("each sequence has as many queries as keys")
    lengths, (_, Hk, D) = cu_seqlens_q.diff(), k.shape
    places = -(-max_seqlen_q // PAGE)
    table = torch.arange(len(lengths) * places, dtype=torch.int32, device=q.device)
    pages = q.new_zeros(2, len(table), Hk, PAGE, D)
    out = context.context_attention_unpadded(
        q, k, v, *pages, lengths, table.view(len(lengths), places), PAGE,
        max_seq_len=max_seqlen_q, sm_scale=sm_scale,
    )  # fmt: skip
    return out.view(q.shape)
