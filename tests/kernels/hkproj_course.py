"""The kernel of a video course on FlashAttention. It has block pointers, which Triton 3.9 lacks."""

from brought import module

from fa_verify import attention_kernel

TritonAttention = module(
    "hkproj/triton-flash-attention", "triton/flash_attention.py"
).TritonAttention


@attention_kernel(dtypes=("fp16",), head_dims=(64, 128), seqlen_multiple=128, devices=("cuda",))
def attention(q, k, v, causal, softmax_scale):
    """Attend as its test does, in fp16 and with lengths of a multiple of its blocks."""
    return TritonAttention.apply(q, k, v, causal, softmax_scale)
