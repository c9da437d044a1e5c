"""FlagAttention's flash_attention. It asks for the GPU of its tensors."""

from brought import importable

from fa_verify import attention_kernel

importable("FlagOpen/FlagAttention", "src/flag_attn/flash.py", "src")
from flag_attn.flash import attention as flash_attention


@attention_kernel(
    devices=("cuda",), dtypes=("fp16", "bf16"), head_dims=(16, 32, 64, 128), dv_ne_d=False,
    zero_sizes=False, masks=("causal",), returns_lse=True,
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Return out and the log normaliser."""
    return flash_attention(q, k, v, mask.causal, sm_scale, return_log_normalizer=True)[:2]
