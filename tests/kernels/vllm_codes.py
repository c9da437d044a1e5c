"""vLLM's unified_attention over caches of codes: scales of the tensor, and of tokens and heads."""

import torch
from brought import importable
from vllm_paged import KVQuantMode, paged, unified_call

from fa_verify import attention_kernel

importable("vllm-project/vllm", "vllm/v1/attention/ops/triton_unified_attention.py")

# The engine allocates pages of multiples of 16, and attends to at least the new tokens.
codes = paged | {"masks": ("causal", "window"), "score_mods": ("softcap", "alibi", "sinks")}
codes |= {"block_n": 32}
PER_TOKEN = {torch.int8: "INT8_PER_TOKEN_HEAD", torch.float8_e4m3fn: "FP8_PER_TOKEN_HEAD"}


@attention_kernel(**codes, cache_formats=("e4m3fn",), dequantised="rounded")
def per_tensor(
    q, k_cache, v_cache, *, k_scale, v_scale, cache_seqlens, page_table, sm_scale, causal,
    window_size, **mods,
):  # fmt: skip
    """FP8_PER_TENSOR: codes times a scale are rounded to the dtype of q."""
    return unified_call(
        q, k_cache, v_cache, cache_seqlens, page_table, sm_scale, window_size, mods, causal,
        scales=(k_scale, v_scale), kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )  # fmt: skip


@attention_kernel(
    **codes, cache_formats=("e4m3fn", "int8"), cache_scales=("token_head",), v_scale_on="p"
)
def per_token_head(
    q, k_cache, v_cache, *, k_scale, v_scale, cache_seqlens, page_table, sm_scale, causal,
    window_size, **mods,
):  # fmt: skip
    """FP8_PER_TOKEN_HEAD and INT8_PER_TOKEN_HEAD: scales of values multiply P before its cast."""
    return unified_call(
        q, k_cache, v_cache, cache_seqlens, page_table, sm_scale, window_size, mods, causal,
        kv_quant_mode=KVQuantMode[PER_TOKEN[k_cache.dtype]], k_scale_cache=k_scale,
        v_scale_cache=v_scale,
    )  # fmt: skip


@attention_kernel(**codes, cache_formats=("e4m3fn",), dequantised="rounded")
def per_tensor_before_42580(q, k_cache, v_cache, *, k_scale, v_scale, **given):
    """The fault of vLLM before #42580, whose kernel dropped both scales beside an fp8 q."""
    ones = torch.ones_like(k_scale)
    return per_tensor(q, k_cache, v_cache, k_scale=ones, v_scale=ones, **given)
