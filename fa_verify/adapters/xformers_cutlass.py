"""xformers' memory_efficient_attention with its CUTLASS kernels, which takes (B, M, H, D).

It supports bottom-right causal masks. Windows, sequence lengths and grouped heads have no gradient.
"""

from __future__ import annotations

from xformers.ops import fmha, memory_efficient_attention
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

__all__ = ["attention"]

_OPERATORS = (fmha.cutlass.FwOp, fmha.cutlass.BwOp)


def attention(q, k, v, *, mask, sm_scale):
    """xformers' memory-efficient attention. Raises NotImplementedError if no operator fits."""
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
# With M > N the first rows see no key, and receive the results of other rows.
attention.m_ne_n = False
attention.zero_sizes = False
# Loads are 16 bytes wide.
attention.layouts = ("bhsd", "bshd", "padded", "expanded", "packed")
attention.returns_lse = False
# These kernels are the ones of PyTorch's memory-efficient attention, with the same roundings.
attention.ds_scaled = True
attention.ds_from = "rounded"
