"""aiter's paged decoding in Triton, which derives from SGLang's and FLASHNN's."""

import torch
import triton.language as tl
from brought import importable

from fa_verify import attention_kernel

importable("ROCm/aiter", "aiter/ops/triton/attention/pa_decode.py")
from aiter.ops.triton.attention.pa_decode import paged_attention_decode

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@attention_kernel(
    cache=("paged",), one_query=True, masks=(), dtypes=("fp16", "bf16"), dv_ne_d=False,
    zero_sizes=False, page_sizes=(16, 32, 64, 128), score_mods=("alibi",), prescales="q",
)  # fmt: skip
def decode(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, alibi_slopes=None):
    """paged_attention_decode, with one scale of 1 for all keys and values."""
    if k_cache.stride() != v_cache.stride():
        raise NotImplementedError("values lie as their keys do")
    if alibi_slopes is not None and alibi_slopes.ndim > 1:
        raise NotImplementedError("all entries have the same slopes")
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    q, one = q[:, :, 0].contiguous(), torch.ones(1, device=q.device)
    out = torch.empty_like(q)
    paged_attention_decode(
        out, q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), cache_seqlens, page_table,
        sm_scale, int(cache_seqlens.max()), TYPES[q.dtype], one, one, alibi_slopes=slopes,
    )  # fmt: skip
    return out.unsqueeze(2)
