"""The public calls on tensors (B, H, S, D): attention, and its probabilities pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fa_kernels import operators
from fa_kernels.configs import Config
from fa_kernels.launch.call_cache import check
from fa_kernels.pooling import check_lse, check_pooling
from fa_kernels.validation.arguments import MaskLike
from fa_kernels.validation.removed import names_replacements

__all__ = ["autocast", "flash_attention", "pooled_attention_probs"]

# What ``torch.autocast`` casts; float64 it leaves alone.
_CAST = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cuda", "cpu")


def autocast(*values: Any) -> tuple[Any, ...]:
    """Tensors in the dtype of the enclosing ``torch.autocast``, as of PyTorch's own attention."""
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return values
    return tuple(map(_cast, values))


def _cast(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.dtype in _CAST and x.device.type in _DEVICES:
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
    return x


@names_replacements(
    backward="deterministic=, True for 'two_pass' and False for 'one_pass'",
    window="window_size=",
    pool="pooled_attention_probs(q, k, lse, pool=..., pool_size=...)",
    pool_size="pooled_attention_probs(q, k, lse, pool=..., pool_size=...)",
)
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: MaskLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    seqlens_q: Sequence[int] | torch.Tensor | None = None,
    seqlens_k: Sequence[int] | torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    block_size: int = 128,
    sm_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    config: Config | str | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exact attention of tensors (B, H, S, D): softmax(sm_scale q k') v over the visible keys.

    The M x N matrix of scores is never in memory.

    Query m of batch entry b stands at p = m + seqlens_k[b] - seqlens_q[b] (bottom-right alignment)
    and sees the keys n with p - window_left <= n <= p + window_right, inclusive. A row that sees no
    key gives out = 0, lse = -inf and takes no part in the gradients. Whatever stands in padding
    (rows past seqlens_q, keys past seqlens_k) influences nothing and gets zero gradients.

    Args:
        q: (B, H, M, D), fp16, bf16, fp32 or float64, any strides.
        k: (B, Hk, N, D) with H a multiple of Hk, dtype and device of q, any strides.
        v: (B, Hk, N, Dv), likewise; D and Dv from 1 to 256.
        mask: An object with the attributes of ``MaskLike``, in place of the next four.
        causal: window_right = 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        seqlens_q: Valid rows, B ints in [0, M] or an int32 tensor (B,) on the device of q, whose
            values are not checked but clamped to [0, M] by the kernels (no synchronisation).
        seqlens_k: Valid keys, B ints in [0, N] or an int32 tensor, likewise.
        block_mask: Bool (H or 1, ceil(M / block_size), ceil(N / block_size)) on the device of q:
            blocks of rows and keys that may see each other; others are hidden, and cost nothing.
            On top of causal, window_size and lengths. It is not differentiated, and nothing waits
            for it: no synchronisation.
        block_size: Rows and keys of a block, a multiple of the configuration's tiles (128 of any
            default one).
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        return_lse: Also return the log-sum-exp.
        deterministic: Whether dq is repeatable to the bit, as all else always is: dk and dv come
            from one kernel, dq from another. False: all come from one kernel, with 5 products of
            matrices in place of 7; dq is a sum by atomics, in another order every time, so its
            last bits differ from run to run.
        config: Tile configuration, a ``Config`` or a name in ``CONFIGS``; None is "default", which
            runs on the portable kernels where the kernels for Hopper are absent. "hopper" is
            "default", and raises a RuntimeError there that gives the reason. For few queries
            against long keys, ``Config(splits=16)`` or so divides the key tiles of each query tile
            among as many programs, and merges what they find.
        softcap: c, finite and > 0: a scaled score x becomes c tanh(x / c), before it is masked.
        alibi_slopes: Float32 (H,) or (B, H) on the device of q: slope |p - n| is taken off each
            score, after the softcap. Not differentiated, and not checked to be finite.
        bias: (B or 1, H or 1, M or 1, N or 1) in the dtype of q or float32, any strides: what is
            added to each score, after the softcap. Finite where a row sees a key; elsewhere it may
            hold anything, and gets zero gradients. Differentiable: its gradient is added up over
            what shares an element. It hides nothing: -inf is for masks.

    Under ``torch.autocast`` q, k, v and bias of 16 and 32 bits are cast to its dtype first. Under
    ``torch.compile`` a mask with a method ``native`` is a constant, and a frozen dataclass.

    Returns:
        out (B, H, M, Dv) in the dtype of q; with ``return_lse`` also lse (B, H, M), the natural
        log-sum-exp of the scaled visible scores, float32 (float64 for float64). Both are
        differentiable; gradients of rows without a visible key are ignored, and the backward
        computes what is asked for alone, dk and dv together.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says which, and what it needs.
        NotImplementedError: What the arguments ask for is not supported.

    Numerics: float32 accumulation (float64 for float64), P and dS rounded once to the input dtype
    before their dots, fp32 dots in IEEE precision unless ``config`` says "tf32". Parts of keys stay
    in the accumulator's dtype, unnormalised, until they are merged: one rescale more for each. The
    number of parts changes the last bits of out and lse; the same number gives the same bits.

    Source: FlashAttention-2 (arXiv:2307.08691); Flash-Decoding (Dao, Haziza, Massa, Sizov 2023)
    for the parts.
    """
    q, k, v, bias = autocast(q, k, v, bias)
    request = check(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        window_size=window_size,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        block_mask=block_mask,
        block_size=block_size,
        sm_scale=sm_scale,
        deterministic=deterministic,
        config=config,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
    )
    out, lse = operators.run_forward(q, k, v, request)
    return (out, lse) if return_lse else out


def pooled_attention_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    pool: str,
    pool_size: tuple[int, int],
    mask: MaskLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    seqlens_q: Sequence[int] | torch.Tensor | None = None,
    seqlens_k: Sequence[int] | torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    block_size: int = 128,
    sm_scale: float | None = None,
    config: Config | str | None = None,
) -> torch.Tensor:
    """The probabilities of attention, tensors (B, H, S, D), pooled over blocks of pairs.

    With P[m, n] = exp(s[m, n] - lse[m]) where m sees n and 0 everywhere else, block (i, j) holds
    the pairs with i rows <= m < (i + 1) rows and j keys <= n < (j + 1) keys, and of these the valid
    ones have m < seqlens_q[b], n < seqlens_k[b]. "mean" is the sum of P over the valid pairs
    divided by their number, so that hidden pairs count, with P = 0; "max" is the largest P of a
    valid pair. A block without a valid pair gives 0, and so does one without a visible pair. Blocks
    are counted from row 0 and key 0, whatever the lengths.

    Args:
        q: (B, H, M, D), as in ``flash_attention``.
        k: (B, Hk, N, D).
        lse: (B, H, M), that of ``flash_attention`` with the same mask and scale, and without
            softcap, alibi_slopes or bias.
        pool: "mean" or "max".
        pool_size: (rows, keys) of a block, ints >= 1 of any size.
        mask: As in ``flash_attention``; so are the next six.
        causal: window_right = 0.
        window_size: (window_left, window_right).
        seqlens_q: Valid rows.
        seqlens_k: Valid keys.
        block_mask: Blocks of rows and keys that may see each other.
        block_size: Rows and keys of such a block.
        sm_scale: Factor on q.k.
        config: Tile configuration, of which the tile of dq is taken.

    Returns:
        pooled (B, H, ceil(M / rows), ceil(N / keys)), float32 (float64 for float64), a constant: it
        is not differentiated, and does not require a gradient.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says which, and what it needs.
        NotImplementedError: What the arguments ask for is not supported.

    Numerics: P is recomputed from q, k and lse, as in the backward, and never rounded to the input
    dtype. The M x N matrix is never in memory. ``oracles/bounds/pooled.py`` derives the bound.
    """
    q, k = autocast(q, k)
    pooling = check_pooling(pool, pool_size)
    request = check(
        q,
        k,
        k,
        mask=mask,
        causal=causal,
        window_size=window_size,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        block_mask=block_mask,
        block_size=block_size,
        sm_scale=sm_scale,
        deterministic=True,
        config=config,
        softcap=None,
        alibi_slopes=None,
        bias=None,
    )
    return operators.pooled_scores(q, k, check_lse(lse, q), *request, *pooling)
