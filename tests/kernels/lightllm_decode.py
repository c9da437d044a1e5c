"""lightllm's decoding kernel for grouped heads, which reads keys through a table of tokens."""

import torch
from brought import importable

from fa_verify import attention_kernel

importable(
    "ModelTC/lightllm", "lightllm/models/llama/triton_kernel/gqa_decode_flashattention_nopad.py"
)
from lightllm.models.llama.triton_kernel import gqa_decode_flashattention_nopad as kernels


@attention_kernel(
    one_query=True, backward=False, fixed_scale="1/sqrt(D)", masks=("padding",), dv_ne_d=False,
    dtypes=("fp16", "bf16"), head_dims=(16, 32, 64, 128), zero_sizes=False, p_normalised=True,
)  # fmt: skip
def attention(q, k, v, *, mask):
    """Attend with one query, to keys that lie backwards in the cache."""
    (B, H, _, D), (Hk, S) = q.shape, k.shape[1:3]
    lengths = torch.tensor(mask.lengths(B, 1, S)[1], dtype=torch.int32, device=q.device)
    cached = [x.transpose(1, 2).reshape(B * S, Hk, D).flip(0).contiguous() for x in (k, v)]
    table = torch.arange(B * S, dtype=torch.int32, device=q.device).flip(0).view(B, S)
    entries = torch.arange(B, dtype=torch.int32, device=q.device)
    # The kernel takes a stride of the last axis and assumes 1, as in the engine.
    out = q.new_empty(B, H, D)
    kernels.gqa_decode_attention_fwd(q[:, :, 0].contiguous(), *cached, out, table, entries, lengths)
    return out.unsqueeze(2)
