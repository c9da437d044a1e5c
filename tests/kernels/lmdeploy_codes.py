"""lmdeploy's paged decoding kernel over caches of e4m3, e5m2 and int8."""

import math
import sys

import torch
import triton.language as tl
from brought import importable
from lmdeploy_decode import PAGE, _QuantPolicy, flash_attn_with_kvcache

from fa_verify import attention_kernel

importable("InternLM/lmdeploy", "lmdeploy/pytorch/kernels/cuda/pagedattention.py")
if not torch.cuda.is_available():
    # The number of splits, and a case for devices before Ampere, follow the device. The interpreter
    # replaces functions of the language by name, and not those that a module has kept.
    pagedattention = sys.modules[flash_attn_with_kvcache.__module__]
    pagedattention.tl_log2 = lambda x: math.log2(x) if isinstance(x, float) else tl.log2(x)
    pagedattention.tl_exp2 = lambda x: tl.exp2(x)
    pagedattention._nv_cap = (9, 0)
    pagedattention.get_device_props = lambda device: {
        "multi_processor_count": 132, "warps_per_sm": 64,
    }  # fmt: skip
codes = {
    "cache": ("paged",), "page_sizes": (PAGE, 32, 64), "one_query": True, "masks": (),
    "dtypes": ("fp16", "bf16"), "dv_ne_d": False, "zero_sizes": False, "splits": 64,
    "head_dims": (32, 64, 128), "block_n": PAGE,
}  # fmt: skip
POLICIES = {
    torch.float8_e4m3fn: _QuantPolicy.FP8, torch.float8_e5m2: _QuantPolicy.FP8_E5M2,
}  # fmt: skip


def _decode(q, k_cache, v_cache, k_meta, v_meta, policy, cache_seqlens, page_table, sm_scale):
    out = flash_attn_with_kvcache(
        q[:, :, 0], k_cache, v_cache, cache_seqlens, page_table, softmax_scale=sm_scale,
        k_scales_zeros=k_meta, v_scales_zeros=v_meta, quant_policy=policy,
    )  # fmt: skip
    return out.unsqueeze(2)


@attention_kernel(**codes, cache_formats=("e4m3fn", "e5m2"), v_scale_on="p")
def per_tensor(q, k_cache, v_cache, *, k_scale, v_scale, cache_seqlens, page_table, sm_scale):
    """quant_policy FP8 and FP8_E5M2: scales multiply scores, and P before its cast."""
    policy = POLICIES[k_cache.dtype]
    return _decode(
        q, k_cache, v_cache, k_scale, v_scale, policy, cache_seqlens, page_table, sm_scale
    )


@attention_kernel(
    **codes, cache_formats=("int8",), cache_scales=("token_head",), dequantised="rounded"
)
def per_token_head(q, k_cache, v_cache, *, k_scale, v_scale, cache_seqlens, page_table, sm_scale):
    """quant_policy INT8: unsigned codes less a zero point of 128, times a scale."""
    shifted = [(x.short() + 128).to(torch.uint8) for x in (k_cache, v_cache)]
    meta = [torch.stack((x, torch.full_like(x, 128.0)), -1) for x in (k_scale, v_scale)]
    return _decode(q, *shifted, *meta, _QuantPolicy.INT8, cache_seqlens, page_table, sm_scale)
