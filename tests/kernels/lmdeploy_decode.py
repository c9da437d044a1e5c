"""lmdeploy's paged decoding kernel, with its default of 16 tokens a page and more."""

import logging

from brought import importable, stand_in
from slots import reversed_pages

from fa_verify import attention_kernel

importable("InternLM/lmdeploy", "lmdeploy/pytorch/kernels/cuda/pagedattention.py")
stand_in("lmdeploy.utils", get_logger=logging.getLogger)


class _QuantPolicy:
    """Of the policies, the one of a cache that is not quantised."""

    NONE, INT4, INT8, FP8, FP8_E5M2, TURBO_QUANT = 0, 4, 8, 16, 17, 42


stand_in("lmdeploy.messages", QuantPolicy=_QuantPolicy)
from lmdeploy.pytorch.kernels.cuda.pagedattention import flash_attn_with_kvcache

PAGE = 16


def cached(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale):
    """Attend with one query."""
    out = flash_attn_with_kvcache(
        q[:, :, 0], k_cache, v_cache, cache_seqlens, page_table, softmax_scale=sm_scale
    )
    return out.unsqueeze(2)


@attention_kernel(
    one_query=True, backward=False, masks=("padding",), dtypes=("fp16", "bf16"), dv_ne_d=False,
    zero_sizes=False, devices=("cuda",), head_dims=(32, 64, 128), splits=64, block_n=PAGE,
    kvcache=cached, cache=("paged",), page_sizes=(PAGE, 32, 64),
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Attend with one query, to pages that lie backwards in the cache."""
    pages, table, lengths = reversed_pages(k, v, PAGE, mask)
    return cached(q, *pages, cache_seqlens=lengths, page_table=table, sm_scale=sm_scale)
