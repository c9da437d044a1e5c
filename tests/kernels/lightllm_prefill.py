"""lightllm's prefill kernel, which reads keys through a table of tokens, cached ones among them."""

import itertools

import torch
from brought import importable, stand_in

from fa_verify import attention_kernel

importable(
    "ModelTC/lightllm", "lightllm/models/llama/triton_kernel/context_flashattention_nopad.py"
)
# The tile width of a Tesla is another one; the original asks for the name of a GPU.
stand_in("lightllm.utils.device_utils", is_tesla=lambda: False, is_hopper=lambda: False)
from lightllm.models.llama.triton_kernel import context_flashattention_nopad as kernels


@attention_kernel(
    varlen=True, always_causal=True, backward=False, fixed_scale="1/sqrt(D)", m_gt_n=False,
    masks=("causal", "padding"), dtypes=("fp16", "bf16"), head_dims=(16, 32, 64, 128, 256),
    dv_ne_d=False, zero_sizes=False, block_n=128,
)  # fmt: skip
def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask):
    """Attend to keys that lie backwards in the cache."""
    starts = cu_seqlens_k.tolist()
    lengths = cu_seqlens_k.diff()
    table = torch.zeros(len(lengths), max(1, max_seqlen_k), dtype=torch.int32, device=q.device)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        table[row, : end - start] = k.shape[0] - 1 - torch.arange(start, end, device=q.device)
    entries = torch.arange(len(lengths), dtype=torch.int32, device=q.device)
    out = torch.empty_like(q)
    kernels.context_attention_fwd(
        q, k.flip(0), v.flip(0), out, entries, cu_seqlens_q[:-1], lengths,
        lengths - cu_seqlens_q.diff(), max_seqlen_q, table,
    )  # fmt: skip
    return out
