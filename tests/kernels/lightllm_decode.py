"""lightllm's decoding kernel for grouped heads, which reads keys through a table of tokens."""

import torch
from brought import importable
from slots import reversed_pages, slots, slots_of

from fa_verify import attention_kernel

importable(
    "ModelTC/lightllm", "lightllm/models/llama/triton_kernel/gqa_decode_flashattention_nopad.py"
)
from lightllm.models.llama.triton_kernel import gqa_decode_flashattention_nopad as kernels


def cached(q, k_cache, v_cache, *, cache_seqlens, page_table):
    """Attend with one query; the table has a token's slot for each key."""
    table = slots_of(k_cache, v_cache, page_table, int(cache_seqlens.max())).int()
    entries = torch.arange(len(q), dtype=torch.int32, device=q.device)
    # The kernel takes a stride of the last axis and assumes 1, as in the engine.
    out = torch.empty_like(q[:, :, 0], memory_format=torch.contiguous_format)
    kernels.gqa_decode_attention_fwd(
        q[:, :, 0].contiguous(), slots(k_cache), slots(v_cache), out, table, entries, cache_seqlens
    )
    return out.unsqueeze(2)


@attention_kernel(
    one_query=True, backward=False, fixed_scale="1/sqrt(D)", masks=("padding",), dv_ne_d=False,
    dtypes=("fp16", "bf16"), head_dims=(16, 32, 64, 128), zero_sizes=False, p_normalised=True,
    kvcache=cached, cache=("paged",),
)  # fmt: skip
def attention(q, k, v, *, mask):
    """Attend with one query, to keys that lie backwards in the cache."""
    pages, table, lengths = reversed_pages(k, v, 1, mask)
    return cached(q, *pages, cache_seqlens=lengths, page_table=table)
