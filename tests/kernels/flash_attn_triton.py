"""flash-attention's kernel in Triton. It asserts that its tensors are on a GPU."""

from brought import module

from fa_verify import attention_kernel

flash_attn_func = module(
    "Dao-AILab/flash-attention", "flash_attn/flash_attn_triton.py"
).flash_attn_func


@attention_kernel(
    devices=("cuda",), dtypes=("fp16", "bf16"), gqa=False, dv_ne_d=False, zero_sizes=False,
    masks=("causal",), head_dims=(16, 32, 40, 64, 80, 96, 128),
    score_mods=("bias",), atomic=("dq",), block_n=128,
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale, bias=None):
    """Attend with (batch, seqlen, heads, dim), causal masks aligned at the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, bias, mask.causal, sm_scale).transpose(1, 2)
