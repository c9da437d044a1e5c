"""What ours is measured beside: PyTorch's attentions, each at its best call.

Each is f(q, k, v, causal) of (B, H, N, D), and raises where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_kernels import flash_attention

__all__ = ["PEERS", "Attention", "ours", "sdpa_flash"]

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Our kernels in their default configuration."""
    return flash_attention(q, k, v, causal=causal)


def _portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Ours without what one architecture alone has."""
    return flash_attention(q, k, v, causal=causal, config="portable")


def _sdpa(backend: SDPBackend) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


sdpa_flash = _sdpa(SDPBackend.FLASH_ATTENTION)  # FlashAttention-2


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # It compiles for every shape, and past the limit it runs uncompiled.
    torch._dynamo.config.recompile_limit = 1000
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


@cache
def _causal_blocks(N: int, device: torch.device) -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, m, n: m >= n, None, None, N, N, device=device)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    blocks = _causal_blocks(q.shape[2], q.device) if causal else None
    return _compiled_flex()(q, k, v, block_mask=blocks)


PEERS: dict[str, Attention] = {
    "ours": ours,
    "ours, portable": _portable,
    "cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": _flex,
    "SDPA flash": sdpa_flash,
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA math": _sdpa(SDPBackend.MATH),
}
