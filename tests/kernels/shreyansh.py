"""shreyansh26's FlashAttention in plain PyTorch, with its own backward. It asks for a GPU."""

import importlib.util

import torch
from brought import importable, module

from fa_verify import attention_kernel

REPOSITORY = "shreyansh26/FlashAttention-PyTorch"
if importlib.util.find_spec("einops") is None:
    importable("arogozhnikov/einops", "einops/einops.py")
masked, causal = (
    module(REPOSITORY, path) for path in ("flash_attention.py", "flash_attention_causal.py")
)


def _with_backward(forward, backward):
    """Join a forward and a backward that takes its inputs and results."""

    class Joined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward(*inputs)
            ctx.save_for_backward(*inputs, *results)
            return results[0]

        @staticmethod
        def backward(ctx, dout):
            return (*backward(*ctx.saved_tensors, dout), None)

    return Joined.apply


_masked = _with_backward(masked.flash_attention_forward, masked.flash_attention_backward)
_causal = _with_backward(
    lambda q, k, v, _: causal.flash_attention_causal_forward(q, k, v),
    lambda q, k, v, _, *rest: causal.flash_attention_causal_backward(q, k, v, *rest),
)
ours = {
    "devices": ("cuda",), "dtypes": ("fp32",), "fixed_scale": "1/sqrt(D)", "gqa": False,
    "dv_ne_d": False, "zero_sizes": False,
}  # fmt: skip


@attention_kernel(**ours, masks=("padding",))
def attention(q, k, v, *, mask):
    """Attend with a mask of keys."""
    (B, _, M, _), N = q.shape, k.shape[2]
    rows, keys = mask.lengths(B, M, N)
    if any(row < M for row in rows):
        raise NotImplementedError("it takes a mask of keys")
    seen = torch.arange(N, device=q.device) < torch.tensor(keys, device=q.device)[:, None]
    return _masked(q, k, v, seen.int())


@attention_kernel(**ours, always_causal=True, masks=("causal",))
def attention_causal(q, k, v):
    """Attend with a causal mask, aligned at the bottom right."""
    return _causal(q, k, v, torch.empty(0))
