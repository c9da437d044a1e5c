"""FLASHNN's flash_attn_v2, a forward for grouped heads. It has block pointers."""

from brought import importable

from fa_verify import attention_kernel

importable("AlibabaPAI/FLASHNN", "flashnn/triton_kernels/flash_attn_v2.py")
from flashnn.triton_kernels.flash_attn_v2 import triton_flash_attention_forward


@attention_kernel(
    dtypes=("fp16",), head_dims=(16, 32, 64, 128), masks=("causal",), m_ne_n=False,
    dv_ne_d=False, zero_sizes=False, backward=False, block_n=64,
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Attend with tensors (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return triton_flash_attention_forward(q, k, v, mask.causal, sm_scale).transpose(1, 2)
