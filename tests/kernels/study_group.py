"""The kernel of a Triton study group: one pass with atomic additions to dq, or two passes."""

from brought import module

from fa_verify import attention_kernel

kernels = module("Starmys/TritonStudyGroup", "6_Triton_Flash_Attn/triton_flash_attn.py")
_DOMAIN = {
    "dtypes": ("fp16", "bf16"), "head_dims": (16, 32, 64, 128), "prescales": "q", "gqa": False,
    "m_ne_n": False, "dv_ne_d": False, "zero_sizes": False, "masks": ("causal",),
}  # fmt: skip


@attention_kernel(atomic=("dq",), **_DOMAIN)
def attention(q, k, v, *, mask, sm_scale):
    """Attend with one kernel of the backward, which adds to dq."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return kernels.triton_flash_attn_func(q, k, v, sm_scale, mask.causal).transpose(1, 2)


@attention_kernel(**_DOMAIN)
def split(q, k, v, *, mask, sm_scale):
    """Attend with two kernels of the backward."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return kernels.triton_flash_attn_split_bwd_func(q, k, v, sm_scale, mask.causal).transpose(1, 2)
