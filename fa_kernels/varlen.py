"""The call for sequences of many lengths that stand one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa_kernels import operators
from fa_kernels.attention import autocast
from fa_kernels.configs import Config
from fa_kernels.validation.arguments import MaskLike, check
from fa_kernels.validation.removed import names_replacements

__all__ = ["flash_attention_varlen"]


@names_replacements(
    backward="deterministic=, True for 'two_pass' and False for 'one_pass'", window="window_size="
)
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Sequence[int] | torch.Tensor,
    cu_seqlens_k: Sequence[int] | torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: MaskLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    sm_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    config: Config | str | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each of B sequences to itself, as ``flash_attention`` of one after the other.

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], exclusive, of q and the rows
    cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and v; either may be none. Positions count from its
    own first row and key: query m stands at p = m + its keys - its rows. In the same tiles it gets
    the bits that it gets alone.

    Rows before the first offset or from the last on belong to no sequence: whatever they hold,
    their out is 0, their lse -inf, their gradients are 0.

    Args:
        q: (total_q, H, D), fp16, bf16, fp32 or float64, any strides.
        k: (total_k, Hk, D) with H a multiple of Hk, dtype and device of q, any strides.
        v: (total_k, Hk, Dv), likewise; D and Dv from 1 to 256.
        cu_seqlens_q: B + 1 ascending ints in [0, total_q], or such an int32 tensor on the device of
            q, whose values are not checked: the kernels clamp places to [0, total_q] and lengths to
            [0, max_seqlen_q] (no synchronisation).
        cu_seqlens_k: Likewise, of keys.
        max_seqlen_q: The most rows that a sequence has, or more. None: the longest of ints, and
            total_q for a tensor.
        max_seqlen_k: Likewise.
        mask: An object with the attributes of ``MaskLike`` in place of the next two; b, m and n
            count sequences, and rows and keys of one. Its lengths are None, or those of offsets
            that are ints: those a mask with a predicate has to have, which counts by them.
        causal: window_right = 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        return_lse: Also return the log-sum-exp.
        deterministic: As in ``flash_attention``.
        config: As in ``flash_attention``.
        softcap: As in ``flash_attention``.
        alibi_slopes: As in ``flash_attention``, (H,) or (B, H).

    Returns:
        out (total_q, H, Dv), a view of storage (H, total_q, Dv), in the dtype of q; with
        ``return_lse`` also lse (H, total_q), float32 (float64 for float64). Both are
        differentiable.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says which, and what it needs.
        NotImplementedError: What the arguments ask for is not supported.

    Numerics: those of ``flash_attention``.
    """
    q, k, v = autocast(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; needs a torch.Tensor")
        if x.ndim != 3:
            axes = "(total_q, H, D)" if name == "q" else "(total_k, Hk, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs three axes {axes}")
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    request = check(
        *heads_first,
        mask=mask,
        causal=causal,
        window_size=window_size,
        seqlens_q=None,
        seqlens_k=None,
        sm_scale=sm_scale,
        deterministic=deterministic,
        config=config,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        offsets=(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k),
    )
    out, lse = operators.run_forward(*heads_first, request)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out
