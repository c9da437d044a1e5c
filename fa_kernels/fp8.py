"""The public function on e4m3 tensors with scales, forward alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa_kernels.configs import Config
from fa_kernels.launch.call_cache import prepared
from fa_kernels.launch.fp8 import IMPRECISE, Scales, launch_forward_fp8
from fa_kernels.validation import arguments
from fa_kernels.validation.arguments import MaskLike

__all__ = ["flash_attention_fp8"]

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
# Keys of the smallest tile of a product of 8 bits.
_LEAST_KEYS = 32


def flash_attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    accumulator: str = "promoted",
    cu_seqlens_q: Sequence[int] | torch.Tensor | None = None,
    cu_seqlens_k: Sequence[int] | torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: MaskLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    seqlens_q: Sequence[int] | torch.Tensor | None = None,
    seqlens_k: Sequence[int] | torch.Tensor | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    config: Config | str | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of codes q, k, v times their scales, as ``flash_attention`` does.

    Args:
        q: (B, H, M, D), torch.float8_e4m3fn, any strides; (total_q, H, D) with ``cu_seqlens_q``.
        k: (B, Hk, N, D), as q; (total_k, Hk, D) with ``cu_seqlens_k``.
        v: (B, Hk, N, Dv), as k. D and Dv lie in [1, 256].
        q_scale: Float32 on the device of q, finite and > 0: (B or 1, H or 1, M or 1), a scale for
            each token and head, head, or tensor; (total_q or 1, H or 1) for packed sequences. It is
            not checked.
        k_scale: As q_scale: (B or 1, Hk or 1, N or 1), or (total_k or 1, Hk or 1).
        v_scale: As q_scale: (B or 1, Hk or 1), where B counts packed sequences, too.
        dtype: Dtype of out: bfloat16, float16 or float32.
        accumulator: How tensor cores of Hopper add products. "promoted" adds 32 of them in 13 bits,
            and these sums in float32. "tensor_core" adds all products of a tile, and those of all
            tiles with P, in 13 bits. "fp32" multiplies in 16 bits, slower, and adds in float32.
        cu_seqlens_q: Cumulative lengths of packed sequences, as in ``flash_attention_varlen``.
        cu_seqlens_k: As ``cu_seqlens_q``; both are given, or neither.
        max_seqlen_q: As in ``flash_attention_varlen``.
        max_seqlen_k: As in ``flash_attention_varlen``.
        mask: As in ``flash_attention``, and so are the arguments after it.
        causal: Sets window_right to 0.
        window_size: (window_left, window_right), ints >= 0; None or -1 is unbounded.
        seqlens_q: Valid rows of each batch entry. Codes and scales of padding affect no result.
        seqlens_k: Valid keys of each batch entry.
        sm_scale: Factor on q.k, finite and > 0; None is D ** -0.5.
        return_lse: Also return the log-sum-exp.
        config: A configuration whose forward tile has at least 32 keys.
        softcap: c, finite and > 0.
        alibi_slopes: Float32 (H,) or (B, H).
        sinks: Float32 (H,).

    Returns:
        out (B, H, M, Dv) in ``dtype``; with ``return_lse`` also lse (B, H, M), float32. For packed
        sequences (total_q, H, Dv) and (H, total_q).

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported, such as gradients.

    Numerics: dots of e4m3 have exact products. P is rounded to e4m3 relative to the maximum of its
    row so far, times 2**8; its sum adds the P before that. Scales of rows, of heads of keys and
    sm_scale are multiplied in float32 and then multiply a dot; scales of tokens of keys come first.
    Scales of v multiply out.

    Source: FlashAttention-3 (arXiv:2407.08608), section 3.3.
    """
    tensors = {"q": q, "k": k, "v": v}
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed and (cu_seqlens_q is None or cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is None; needs cumulative lengths, as the other one is given")
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; needs a torch.Tensor")
        if x.ndim != 4 - packed:
            axes = "three axes (total, H, D)" if packed else "four axes (B, H, S, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs {axes}")
    if packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if dtype not in _OUTPUTS:
        raise ValueError(f"dtype is {dtype}; needs one of {_OUTPUTS}")
    if accumulator not in IMPRECISE:
        raise ValueError(f"accumulator is {accumulator!r}; needs one of {tuple(IMPRECISE)}")
    offsets = (cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k) if packed else None
    request = arguments.check(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        window_size=window_size,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        sm_scale=sm_scale,
        deterministic=True,
        config="default" if config == "hopper" else config,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        offsets=offsets,
        dtypes=(torch.float8_e4m3fn,),
    )
    call = prepared(q, k, v, request, ("forward",))
    if call.config.forward.block_n < _LEAST_KEYS:
        raise NotImplementedError(
            f"config has a forward tile of {call.config.forward.block_n} keys; supported for e4m3 "
            f"are {_LEAST_KEYS} and more"
        )
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    entries = len(call.seqlens_q) - 1 if packed else B
    scales = Scales(
        _scale("q_scale", q_scale, (B, H, M), q, packed),
        _scale("k_scale", k_scale, (B, Hk, N), q, packed),
        _scale("v_scale", v_scale, (entries, Hk), q, False),
    )
    out, lse = launch_forward_fp8(q, k, v, scales, call, dtype=dtype, accumulator=accumulator)
    if packed:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _scale(
    name: str, scale: object, sizes: tuple[int, ...], q: torch.Tensor, packed: bool
) -> torch.Tensor:
    """Returns scales of ``sizes``, with a stride of 0 along axes that share them.

    Packed scales (total, heads) become (1, heads, total).
    """
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is {type(scale).__name__}; needs a torch.Tensor")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {scale.dtype}; needs torch.float32")
    if scale.device != q.device:
        raise ValueError(f"{name} is on {scale.device}; needs the device of q, {q.device}")
    needed = (sizes[2], sizes[1]) if packed else sizes
    fits = scale.ndim == len(needed) and all(
        x in (1, size) for x, size in zip(scale.shape, needed, strict=True)
    )
    if not fits:
        alternatives = ", ".join(f"{size} or 1" for size in needed)
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; needs ({alternatives})")
    if packed:
        scale = scale.transpose(0, 1).unsqueeze(0)
    strides = tuple(
        0 if size == 1 else step for size, step in zip(scale.shape, scale.stride(), strict=True)
    )
    # A shared scale is there without tokens, too.
    shape = tuple(size if step else max(1, size) for size, step in zip(sizes, strides, strict=True))
    return scale.as_strided(shape, strides)
