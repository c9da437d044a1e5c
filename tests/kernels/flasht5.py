"""flashT5's flash_attention_v2_bias, which takes a bias of each pair."""

import contextlib

import torch
from brought import module

from fa_verify import attention_kernel

kernels = module("catie-aq/flashT5", "src/model/ops/flash_attention_v2_bias.py")
if not torch.cuda.is_available():
    # It registers its operators for CUDA alone, and chooses tiles by the GPU: these are Hopper's.
    torch.cuda.get_device_capability = lambda: (9, 0)
    torch.cuda.device = contextlib.nullcontext
    for operator in (kernels.flash_attn_v2_fwd, kernels.flash_attn_v2_bwd):
        operator.register_kernel("cpu")(operator._init_fn)


@attention_kernel(
    dtypes=("fp16", "bf16"), head_dims=(16, 32, 64, 128), gqa=False, dv_ne_d=False,
    zero_sizes=False, masks=("causal",), score_mods=("bias",), block_n=32,
    backward_reads=("out", "lse"),
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale, bias=None):
    """Attend with a bias of shape (B or 1, H or 1, M, N) in the dtype of q."""
    if bias is not None:
        if bias.dtype != q.dtype:
            raise NotImplementedError("its gradient of the bias has the dtype of q")
        if bias.shape[2:] != (q.shape[2], k.shape[2]):
            bias = bias.expand(-1, -1, q.shape[2], k.shape[2]).contiguous()
    return kernels.flash_attention_v2_bias(q, k, v, bias, mask.causal, sm_scale)
