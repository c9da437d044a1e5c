"""PyTorch's FlexAttention, compiled, with its log-sum-exp."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

__all__ = ["attention"]

# Every dtype and head_dim is compiled separately. Beyond this limit PyTorch falls back to eager
# code.
torch._dynamo.config.recompile_limit = 512
_compiled = torch.compile(flex_attention, dynamic=True)
# With fewer rows PyTorch uses a decoding kernel, whose one tile holds the rows of a whole group and
# has at most this many rows.
_DECODED = 128


def attention(q, k, v, *, mask, sm_scale):
    """FlexAttention with the mask as a mask_mod."""
    (B, H, M, _), N = q.shape, k.shape[2]
    if M < _DECODED < M * H // k.shape[1]:
        raise NotImplementedError("FlexAttention: no kernel for so few rows of so many heads")
    lengths = torch.tensor(mask.lengths(B, M, N), dtype=torch.int32, device=q.device)
    seqlens_q, seqlens_k = lengths.unbind()
    # M + N does not restrict the window. Tensors, because captured ints are compiled in.
    left = M + N if mask.window_left is None else mask.window_left
    right = M + N if mask.right is None else mask.right
    lowest, highest = torch.tensor([-left, right], device=q.device).unbind()

    def seen(b, h, m, n):
        distance = n - (m + seqlens_k[b] - seqlens_q[b])
        inside = (distance >= lowest) & (distance <= highest)
        return inside & (m < seqlens_q[b]) & (n < seqlens_k[b])

    blocks = create_block_mask(seen, B, None, M, N, device=q.device)
    out, found = _compiled(
        q, k, v, block_mask=blocks, scale=sm_scale, enable_gqa=k.shape[1] != H,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, found.lse


attention.devices = ("cuda",)
# Each pair of dtype and head_dim takes minutes to compile.
attention.dtypes = ("fp16", "bf16")
attention.head_dims = (64, 128)
attention.dv_ne_d = False
# The predicates of other masks cannot be passed as a mask_mod.
attention.masks = ("causal", "window", "padding")
attention.zero_sizes = False
# Hidden keys have weight 0, and 0 times NaN (or an infinite dP) in padding is NaN.
attention.dirty = ("zero", "noise", "noise_q", "noise_k", "noise_v", "noise_dout")
# The adapter copies lengths from the host.
attention.cuda_graphs = False
attention.returns_lse = True
attention.ds_scaled = True
