"""attorch's copy of the fused attention of triton-lang/kernels. It has block pointers."""

import torch
from brought import module

from fa_verify import attention_kernel

kernels = module("BobMcDear/attorch", "attorch/multi_head_attention_kernels.py")
if not torch.cuda.is_available():
    # It refuses GPUs older than Ampere.
    torch.cuda.get_device_capability = lambda: (8, 0)
limits = {
    "dtypes": ("fp16", "bf16"), "head_dims": (16, 32, 64, 128), "seqlen_multiple": 128,
    "zero_sizes": False,
}  # fmt: skip


@attention_kernel(**limits, prescales="q", ds_scaled=True, backward_reads=("out", "lse"))
def attention(q, k, v, causal, sm_scale):
    """Attend with contiguous tensors, whose length is a multiple of its blocks."""
    return kernels._attention.apply(q, k, v, causal, sm_scale)


@attention_kernel(
    **limits, masks=("causal",), layouts=("bshd", "packed"), gqa=False, m_ne_n=False,
    dv_ne_d=False, prescales="q", ds_scaled=True, backward_reads=("out", "lse"),
)  # fmt: skip
def layer(q, k, v, *, mask, sm_scale):
    """Attend with heads that lie inside of the tokens, as attorch's MultiheadAttention calls it."""
    return kernels._attention.apply(q, k, v, mask.causal, sm_scale)
