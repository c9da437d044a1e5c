"""xformers' memory_efficient_attention on its CUTLASS kernels, which takes (B, M, H, D).

It has a causal mask at the bottom right. Windows, lengths and grouped heads have no gradient there.
"""

from __future__ import annotations

from xformers.ops import fmha, memory_efficient_attention
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

__all__ = ["attention"]

_OPERATORS = (fmha.cutlass.FwOp, fmha.cutlass.BwOp)


def attention(q, k, v, *, mask, sm_scale):
    """The memory-efficient attention of xformers; what no operator takes is refused."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = LowerTriangularFromBottomRightMask() if mask.causal else None
    try:
        out = memory_efficient_attention(q, k, v, bias, scale=sm_scale, op=_OPERATORS)
    except ValueError as error:
        if "does not support inputs" not in str(error):
            raise
        raise NotImplementedError(str(error).splitlines()[-1].strip()) from None
    return out.transpose(1, 2)


attention.devices = ("cuda",)
attention.dtypes = ("fp16", "bf16", "fp32")
attention.head_dims = tuple(range(8, 257, 8))
attention.masks = ("causal",)
attention.gqa = False
# With more queries than keys the first rows see nothing, and get what other rows see.
attention.m_ne_n = False
attention.zero_sizes = False
# Loads are 16 bytes wide.
attention.layouts = ("bhsd", "bshd", "padded", "expanded", "packed")
attention.returns_lse = False
# The kernels are those of PyTorch's memory-efficient attention, and round as they do.
attention.ds_scaled = True
attention.ds_from = "rounded"
