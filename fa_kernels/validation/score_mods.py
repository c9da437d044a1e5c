"""Validation of ``alibi_slopes``, ``bias`` and ``sinks``."""

from __future__ import annotations

import torch

__all__ = ["check_alibi", "check_bias", "check_sinks"]


def check_alibi(alibi_slopes: object, q: torch.Tensor, B: int) -> None:
    """Checks ``alibi_slopes`` of ``flash_attention`` for B sequences; q is checked.

    Raises:
        TypeError: It is no float32 tensor.
        ValueError: Its shape or device does not match q.
        NotImplementedError: It requires a gradient.
    """
    if alibi_slopes is None:
        return
    if not isinstance(alibi_slopes, torch.Tensor):
        raise TypeError(
            f"alibi_slopes is {type(alibi_slopes).__name__}; needs a float32 torch.Tensor"
        )
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {alibi_slopes.dtype}; needs torch.float32")
    H = q.shape[1]
    if tuple(alibi_slopes.shape) not in ((H,), (B, H)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; needs ({H},) or ({B}, {H}), a "
            "slope for each head of q"
        )
    if alibi_slopes.device != q.device:
        raise ValueError(
            f"alibi_slopes is on {alibi_slopes.device}; needs the device of q, {q.device}"
        )
    if alibi_slopes.requires_grad:
        raise NotImplementedError("alibi_slopes requires a gradient; supported are detached slopes")


def check_bias(bias: object, q: torch.Tensor, k: torch.Tensor) -> None:
    """Checks ``bias`` of ``flash_attention``; q and k are checked.

    Raises:
        TypeError: It is no tensor, or its dtype is neither that of q nor float32.
        ValueError: Its shape or device does not match q and k.
        NotImplementedError: It is not strided.
    """
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias is {type(bias).__name__}; needs a torch.Tensor")
    if bias.layout is not torch.strided:
        raise NotImplementedError(f"bias has layout {bias.layout}; needs a strided tensor")
    if bias.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"bias has dtype {bias.dtype}; needs that of q, {q.dtype}, or float32")
    sizes = (*q.shape[:3], k.shape[2])
    if bias.ndim != 4 or any(x not in (1, size) for x, size in zip(bias.shape, sizes, strict=True)):
        needs = ", ".join("1" if size == 1 else f"{size} or 1" for size in sizes)
        raise ValueError(f"bias has shape {tuple(bias.shape)}; needs ({needs})")
    if bias.device != q.device:
        raise ValueError(f"bias is on {bias.device}; needs the device of q, {q.device}")


def check_sinks(sinks: object, q: torch.Tensor) -> None:
    """Checks ``sinks`` of ``flash_attention``; q is checked.

    Raises:
        TypeError: It is no float32 tensor.
        ValueError: Its shape or device does not match q.
        NotImplementedError: It is not strided.
    """
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks is {type(sinks).__name__}; needs a float32 torch.Tensor")
    if sinks.layout is not torch.strided:
        raise NotImplementedError(f"sinks has layout {sinks.layout}; needs a strided tensor")
    if sinks.dtype != torch.float32:
        raise TypeError(f"sinks has dtype {sinks.dtype}; needs torch.float32")
    H = q.shape[1]
    if tuple(sinks.shape) != (H,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; needs ({H},), a score for each head of q"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}; needs the device of q, {q.device}")
