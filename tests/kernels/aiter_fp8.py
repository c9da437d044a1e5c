"""aiter's fp8 prefill in Triton, which FlashAttention's backend for AMD GPUs calls.

Its launcher asks for the GPU of its tensors, so that the adapter launches the kernel.
"""

import json
import os

import torch
import triton
from brought import importable

from fa_verify import attention_kernel

BLOCK_M, BLOCK_N = 64, 32
TILES = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "PRE_LOAD_V": False}
os.environ["FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"] = "0"
os.environ["FLASH_ATTENTION_FWD_TRITON_AMD_CONFIG_JSON"] = json.dumps(TILES)
importable(
    "ROCm/aiter", "aiter/ops/triton/_triton_kernels/flash_attn_triton_amd/fwd_prefill.py"
)  # fmt: skip
from aiter.ops.triton._triton_kernels.flash_attn_triton_amd.fwd_prefill import attn_fwd


@attention_kernel(
    quantised=True, qk_scales=("tensor", "head"), v_scales=("tensor", "head"), gqa=False,
    masks=("causal", "window"), head_dims=(16, 32, 64, 72, 128), zero_sizes=False, block_n=BLOCK_N,
)  # fmt: skip
def attention(q, k, v, q_scale, k_scale, v_scale, *, mask, sm_scale, out_dtype):
    """Return out and lse. With grouped heads, the kernel takes the scale of q from a head of k."""
    (B, H, M, D), (N, Dv) = q.shape, v.shape[2:]
    out = q.new_empty((B, H, M, Dv), dtype=out_dtype)
    lse = q.new_empty((B, H, M), dtype=torch.float32)
    scales = [x.expand(B, H).contiguous() for x in (q_scale, k_scale, v_scale)]
    left, right = (-1 if x is None else x for x in (mask.window_left, mask.window_right))
    nothing = (0, 0, 0, 0)
    attn_fwd[(H, triton.cdiv(M, BLOCK_M), B)](
        q, k, v, None, *scales, H, H, H, lse, out, None, None,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        *nothing, 0, 0, *nothing, *lse.stride(), None, None, None, None,
        dropout_p=0.0, philox_seed=None, philox_offset_base=None, HQ=H, HK=H,
        ACTUAL_BLOCK_DMODEL_QK=D, ACTUAL_BLOCK_DMODEL_V=Dv, MAX_SEQLENS_Q=M, MAX_SEQLENS_K=N,
        SM_SCALE=sm_scale, IS_CAUSAL=mask.causal, USE_SLIDING_WINDOW=(left, right) != (-1, -1),
        WINDOW_SIZE_LEFT=left, WINDOW_SIZE_RIGHT=right, IS_VARLEN=False,
        BLOCK_DMODEL_QK=max(16, triton.next_power_of_2(D)),
        BLOCK_DMODEL_V=max(16, triton.next_power_of_2(Dv)), USE_BIAS=False, USE_ALIBI=False,
        ENABLE_DROPOUT=False, USE_EXP2=True, RETURN_SCORES=False, IS_FP8=True, FP8_MAX=448.0,
        FP8_P_DESCALE=False, USE_SEQUSED=False, FORCE_MASKING=False, NUM_XCD=1,
        HEAD_STRIDE_ALIGNED_8=False,
    )  # fmt: skip
    return out, lse
