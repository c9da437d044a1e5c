"""The attention functions under comparison: ours, PyTorch's and flash-attn's.

Each is f(q, k, v, causal) on (B, H, N, D) tensors, and raises if it does not support them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention import SDPBackend

from fa_kernels import flash_attention
from fa_verify.timing import Attention, sdpa, sdpa_flash

__all__ = ["PEERS", "compiled_flex", "ours"]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Our kernels in their default configuration."""
    return flash_attention(q, k, v, causal=causal)


def _one_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Our kernels with dq by atomics, as in all peers but FlexAttention and the composed ones."""
    return flash_attention(q, k, v, causal=causal, deterministic=False)


def _portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Our portable kernels, without instructions of one architecture."""
    return flash_attention(q, k, v, causal=causal, config="portable")


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compiles a function for every shape; past Dynamo's limit it would run uncompiled."""
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 1000
    # With donated buffers, a benchmark could not run the backward repeatedly.
    torch._functorch.config.donated_buffer = False
    compiled: Callable[..., torch.Tensor] = torch.compile(function, dynamic=False)
    return compiled


@cache
def compiled_flex() -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled for every shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled(flex_attention)


@cache
def _causal_blocks(N: int, device: torch.device) -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, m, n: m >= n, None, None, N, N, device=device)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    blocks = _causal_blocks(q.shape[2], q.device) if causal else None
    return compiled_flex()(q, k, v, block_mask=blocks)


@cache
def _hidden(N: int, device: torch.device) -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.bool, device=device).triu(1)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Eager attention, with all scores in memory."""
    scores = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(_hidden(q.shape[2], q.device), float("-inf"))
    return torch.softmax(scores, 3) @ v


@cache
def _compiled_eager() -> Attention:
    return _compiled(_eager)


def _flash_attn(module: str, **options: bool) -> Attention:
    """flash-attn, on (B, N, H, D) tensors; some of its versions return lse too."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        function = importlib.import_module(module).flash_attn_func
        found = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return attention


PEERS: dict[str, Attention] = {
    "ours": ours,
    "ours, one pass": _one_pass,
    "ours, portable": _portable,
    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": _flex,
    "SDPA flash": sdpa_flash,
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA math": sdpa(SDPBackend.MATH),
    "eager": _eager,
    "compiled eager": lambda *asked: _compiled_eager()(*asked),
}
# Looks at installed distributions: looking up a submodule would import flash_attn, which can fail.
for _distribution, _module in (("flash-attn", "flash_attn"), ("flash-attn-4", "flash_attn.cute")):
    if any(importlib.metadata.distributions(name=_distribution)):
        PEERS[_distribution] = _flash_attn(_module)
        PEERS[f"{_distribution}, deterministic"] = _flash_attn(_module, deterministic=True)
