"""The public function on packed sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa_kernels import operators
from fa_kernels.attention import autocast
from fa_kernels.configs import Config
from fa_kernels.validation.arguments import MaskLike, check

__all__ = ["flash_attention_varlen"]


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of (total, H, D) tensors that hold B packed sequences.

    Sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of q and the rows
    [cu_seqlens_k[b], cu_seqlens_k[b + 1]) of k and v; either range may be empty. Positions count
    from the first row and key of the sequence: query m has position p = m + its keys - its rows. A
    sequence gets the same bits as in a call of its own with the same tiles.

    Rows before the first offset and from the last offset on belong to no sequence. Their out is 0,
    their lse is -inf and their gradients are 0, for any values in them.

    Args:
        q: (total_q, H, D), fp16, bf16, fp32 or float64, any strides.
        k: (total_k, Hk, D), with H a multiple of Hk; dtype and device of q, any strides.
        v: (total_k, Hk, Dv), dtype and device of q, any strides. D and Dv lie in [1, 256].
        cu_seqlens_q: Cumulative lengths: B + 1 ascending ints in [0, total_q], or an int32 tensor
            (B + 1,) on the device of q. The kernels clamp the offsets in a tensor to [0, total_q]
            and the lengths to [0, max_seqlen_q]; the host does not check them, so that it need not
            synchronise.
        cu_seqlens_k: Cumulative lengths of the keys, as ``cu_seqlens_q``.
        max_seqlen_q: An upper bound on the rows of a sequence. None takes the longest sequence if
            cu_seqlens_q holds ints, and total_q if it is a tensor.
        max_seqlen_k: An upper bound on the keys of a sequence, as ``max_seqlen_q``.
        mask: An object with the attributes of ``MaskLike``. It replaces ``causal`` and
            ``window_size``. b counts sequences, and m and n count the rows and keys of one. Its
            lengths are None or agree with cu_seqlens given as ints; a mask with a predicate needs
            lengths.
        causal: Sets window_right to 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        return_lse: Also return the log-sum-exp.
        deterministic: As in ``flash_attention``.
        config: As in ``flash_attention``.
        softcap: As in ``flash_attention``.
        alibi_slopes: As in ``flash_attention``, (H,) or (B, H).
        sinks: As in ``flash_attention``, (H,).

    Returns:
        out (total_q, H, Dv) in the dtype of q, a view of storage (H, total_q, Dv). With
        ``return_lse`` also lse (H, total_q), float32 (float64 for float64). Both are
        differentiable.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported.

    Numerics: as in ``flash_attention``.
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
        sinks=sinks,
        offsets=(cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k),
    )
    out, lse = operators.run_forward(*heads_first, request)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out
