"""The kernel of a Triton study group: one pass with atomic additions to dq, or two passes."""

from brought import module

kernels = module("Starmys/TritonStudyGroup", "6_Triton_Flash_Attn/triton_flash_attn.py")


def attention(q, k, v, causal, softmax_scale):
    """Attend with one kernel of the backward, which adds to dq."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return kernels.triton_flash_attn_func(q, k, v, softmax_scale, causal).transpose(1, 2)


def split(q, k, v, causal, softmax_scale):
    """Attend with two kernels of the backward."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return kernels.triton_flash_attn_split_bwd_func(q, k, v, softmax_scale, causal).transpose(1, 2)
