"""The public functions on (B, H, S, D) tensors: attention and pooled attention probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fa_kernels import operators
from fa_kernels.configs import Config
from fa_kernels.launch.call_cache import check
from fa_kernels.pooling import check_lse, check_pooling
from fa_kernels.validation.arguments import MaskLike

__all__ = ["autocast", "flash_attention", "pooled_attention_probs"]

# ``torch.autocast`` casts these dtypes and leaves float64 alone.
_CAST = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cuda", "cpu")


def autocast(*values: Any) -> tuple[Any, ...]:
    """Casts tensors as ``torch.autocast`` does for PyTorch's own attention.

    Values that are not tensors, and all values outside of ``torch.autocast``, are returned as is.
    """
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return values
    return tuple(map(_cast, values))


def _cast(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.dtype in _CAST and x.device.type in _DEVICES:
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
    return x


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes exact attention of (B, H, S, D) tensors, softmax(sm_scale q k') v over visible keys.

    The M x N matrix of scores is never materialised.

    Query m of batch entry b has position p = m + seqlens_k[b] - seqlens_q[b] (bottom-right
    alignment). It sees the keys n with p - window_left <= n <= p + window_right, inclusive. A row
    that sees no key has out = 0 and lse = -inf and contributes nothing to the gradients. Values in
    padding (rows past seqlens_q, keys past seqlens_k) affect no result and get zero gradients.

    Args:
        q: (B, H, M, D), fp16, bf16, fp32 or float64, any strides.
        k: (B, Hk, N, D), with H a multiple of Hk; dtype and device of q, any strides.
        v: (B, Hk, N, Dv), dtype and device of q, any strides. D and Dv lie in [1, 256].
        mask: An object with the attributes of ``MaskLike``. It replaces ``causal``,
            ``window_size``, ``seqlens_q`` and ``seqlens_k``.
        causal: Sets window_right to 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        seqlens_q: Valid rows of each batch entry: B ints in [0, M], or an int32 tensor (B,) on the
            device of q. The kernels clamp the values of a tensor to [0, M]; the host does not
            check them, so that it need not synchronise.
        seqlens_k: Valid keys of each batch entry: B ints in [0, N], or an int32 tensor, as
            ``seqlens_q``.
        block_mask: Bool (H or 1, ceil(M / block_size), ceil(N / block_size)) on the device of q:
            True where a block of rows may see a block of keys. It applies on top of causal,
            window_size and lengths. Hidden blocks are skipped. It is not differentiable and causes
            no synchronisation.
        block_size: Rows and keys of a block, a multiple of the configuration's tiles (128 suits
            every default tile).
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        return_lse: Also return the log-sum-exp.
        deterministic: Whether dq is bitwise repeatable; every other output always is. If True, one
            kernel computes dk and dv and another one dq. If False, one kernel computes all three
            with 5 matrix products instead of 7. It sums dq by atomics in no fixed order, so the
            last bits of dq differ from run to run.
        config: Tile configuration: a ``Config``, a name in ``CONFIGS``, or None for "default".
            Where the kernels for Hopper are absent, "default" runs on the portable kernels, and
            "hopper", which is the same elsewhere, raises a RuntimeError with the reason. For few
            queries and long keys, ``Config(splits=16)`` divides the key tiles of each query tile
            among 16 programs and combines their results.
        softcap: c, finite and > 0: a scaled score x becomes c tanh(x / c), before masking.
        alibi_slopes: Float32 (H,) or (B, H) on the device of q: slope |p - n| is subtracted from
            each score, after the softcap. It is not differentiable, and not checked to be finite.
        bias: (B or 1, H or 1, M or 1, N or 1) in the dtype of q or float32, any strides. It is
            added to each score, after the softcap. It must be finite where a row sees a key;
            elsewhere its values are ignored and its gradient is 0. The gradient is summed over
            broadcast axes. A bias hides no keys; use a mask instead of -inf.
        sinks: Float32 (H,) on the device of q, any stride: the score of one more key of each valid
            row, whose value is 0. It takes part in the softmax as it is: sm_scale, softcap,
            alibi_slopes, bias and masks do not change it. Differentiable. It is not checked:
            it must be at most 1e38; -inf is no sink, to the bit in out and lse.

    Under ``torch.autocast``, q, k, v and bias of 16 and 32 bits are cast to its dtype first. Under
    ``torch.compile``, a mask with a method ``native`` is a constant and must be a frozen dataclass.

    Returns:
        out (B, H, M, Dv) in the dtype of q. With ``return_lse`` also lse (B, H, M), the natural
        log-sum-exp of the scaled visible scores, float32 (float64 for float64). Both are
        differentiable. Gradients of rows without a visible key are ignored. The backward computes
        the gradients that are needed, dk and dv together.

        With ``sinks``, lse includes the sink: without it, lse is lse + log(1 - exp(sink - lse)). A
        valid row without a visible key has out = 0 and lse = sink, and is like any other row: q,
        dout and the gradient of lse must be finite there.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported.

    Numerics: accumulation is in float32 (float64 for float64). P and dS are rounded once to the
    input dtype before their dots. Dots of fp32 inputs use IEEE precision unless ``config`` says
    "tf32". Splits of the keys stay unnormalised in the accumulator's dtype until they are combined,
    which adds one rescale each. The number of splits changes the last bits of out and lse; the same
    number gives the same bits.

    Source: FlashAttention-2 (arXiv:2307.08691); Flash-Decoding (Dao, Haziza, Massa, Sizov 2023)
    for the splits.
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
        sinks=sinks,
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
    """Pools the attention probabilities of (B, H, S, D) tensors over blocks of pairs.

    P[m, n] = exp(s[m, n] - lse[m]) where query m sees key n, and 0 elsewhere. Block (i, j) holds
    the pairs with i rows <= m < (i + 1) rows and j keys <= n < (j + 1) keys. A pair is valid if
    m < seqlens_q[b] and n < seqlens_k[b]. "mean" is the sum of P over the valid pairs divided by
    their number, which includes hidden pairs. "max" is the largest P of a valid pair. A block
    without a valid or visible pair is 0. Blocks start at row 0 and key 0 for all lengths.

    Args:
        q: (B, H, M, D), as in ``flash_attention``.
        k: (B, Hk, N, D), as in ``flash_attention``.
        lse: (B, H, M), as returned by ``flash_attention`` with the same mask and scale, and without
            softcap, alibi_slopes, bias or sinks.
        pool: "mean" or "max".
        pool_size: (rows, keys) of a block, ints >= 1.
        mask: As in ``flash_attention``.
        causal: As in ``flash_attention``.
        window_size: As in ``flash_attention``.
        seqlens_q: As in ``flash_attention``.
        seqlens_k: As in ``flash_attention``.
        block_mask: As in ``flash_attention``.
        block_size: As in ``flash_attention``.
        sm_scale: As in ``flash_attention``.
        config: Tile configuration; the kernel uses its tile of dq.

    Returns:
        pooled (B, H, ceil(M / rows), ceil(N / keys)), float32 (float64 for float64). It is not
        differentiable and does not require a gradient.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported.

    Numerics: P is recomputed from q, k and lse as in the backward, and never rounded to the input
    dtype. The M x N matrix is never materialised. ``oracles/bounds/pooled.py`` derives the bound.
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
        sinks=None,
    )
    return operators.pooled_scores(q, k, check_lse(lse, q), *request, *pooling)
