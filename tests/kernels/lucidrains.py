"""Phil Wang's FlashAttention in plain PyTorch, his ring attention, and its Triton kernel."""

import importlib.metadata
import importlib.util
from unittest import mock

import torch
import triton
from brought import importable, stand_in

from fa_verify import Mask, attention_kernel

if importlib.util.find_spec("einops") is None:
    importable("arogozhnikov/einops", "einops/einops.py")
if importlib.util.find_spec("beartype") is None:
    stand_in("beartype", beartype=lambda function: function)
importable(
    "lucidrains/memory-efficient-attention-pytorch",
    "memory_efficient_attention_pytorch/flash_attention.py",
)
importable(
    "lucidrains/ring-attention-pytorch", "ring_attention_pytorch/ring_flash_attention_cuda.py"
)
from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from ring_attention_pytorch.ring_flash_attention_cuda import ring_flash_attn_cuda

# It asks for the version of the package triton-nightly, and ends the process where there is none.
with mock.patch.object(importlib.metadata, "version", return_value=triton.__version__):
    importlib.import_module("ring_attention_pytorch.triton_flash_attn")

ours = {
    "fixed_scale": "1/sqrt(D)", "dv_ne_d": False, "zero_sizes": False, "block_n": 64,
    "backward_reads": ("out", "lse"),
}  # fmt: skip


@attention_kernel(
    **ours, dtypes=("fp32",), gqa=False, masks=("causal", "window", "padding", "custom"),
    ds_scaled=True,
)  # fmt: skip
def memory_efficient(q, k, v, *, mask):
    """FlashAttentionFunction, in tiles of 32 rows and 64 keys, with a dense mask."""
    causal = mask == Mask(causal=True)
    dense = None
    if not causal and mask != Mask():
        dense = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    return FlashAttentionFunction.apply(q, k, v, dense, causal, 32, 64)


def _ring(function, q, k, v, mask, softcap):
    """Call a ring of one process, with tensors (B, N, H, D) and a mask of keys."""
    (B, H, M, _), (_, Hk, N, _) = q.shape, k.shape
    rows, keys = mask.lengths(B, M, N)
    if any(row < M for row in rows) or (mask.causal and any(key < N for key in keys)):
        raise NotImplementedError("it takes a mask of keys, and ignores it if it is causal")
    seen = torch.arange(N, device=q.device) < torch.tensor(keys, device=q.device)[:, None]
    # Its head h attends to the keys of head h % Hk.
    order = torch.arange(H, device=q.device).view(Hk, -1).T.flatten()
    out = function(
        q[:, order].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        None if min(keys, default=N) == N else seen, mask.causal, 64,
        softclamp_qk_sim=softcap is not None, softclamp_value=softcap or 50.0,
    )  # fmt: skip
    return out.transpose(1, 2)[:, order.argsort()]


@attention_kernel(
    **ours, dtypes=("fp32",), masks=("causal", "padding"), score_mods=("softcap",), ds_scaled=True
)
def ring(q, k, v, *, mask, softcap=None):
    """ring_flash_attn, in buckets of 64 tokens."""
    return _ring(ring_flash_attn, q, k, v, mask, softcap)


@attention_kernel(
    **ours, dtypes=("fp16", "bf16"), masks=("causal", "padding"), score_mods=("softcap",),
    devices=("cuda",), ds_scaled=True, group_sum="dtype",
)  # fmt: skip
def ring_triton(q, k, v, *, mask, softcap=None):
    """ring_flash_attn_cuda, which asserts that its tensors lie on a GPU."""
    return _ring(ring_flash_attn_cuda, q, k, v, mask, softcap)
