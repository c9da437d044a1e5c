"""SageAttention's Triton forward: q and k in int8, scales of blocks, P and its sums in fp16."""

import math

from brought import module

from fa_verify import attention_kernel

NAME = "thu-ml/SageAttention"
all_keys = module(NAME, "sageattention/triton/attn_qk_int8_per_block.py").forward
causal = module(NAME, "sageattention/triton/attn_qk_int8_per_block_causal.py").forward


@attention_kernel(
    quantised=True, qk_formats=("int8",), v_formats=("input",), qk_scales=("block",),
    scale_blocks=(128, 64), dtypes=("fp16",), head_dims=(64, 128), dv_ne_d=False, zero_sizes=False,
    masks=("causal",), causal_alignment="top-left", lse_base="2", block_n=64,
    quantised_numerics={"p_format": "fp16", "pv_bits": 11},
)  # fmt: skip
def attention(q, k, v, q_scale, k_scale, v_scale, *, mask, sm_scale, out_dtype):
    """Return out and lse. The scale of q holds that of the softmax."""
    forward = causal if mask.causal else all_keys
    scale = q_scale * (sm_scale * math.log2(math.e))
    return forward(q, k, v, scale, k_scale, output_dtype=out_dtype, return_lse=True)
