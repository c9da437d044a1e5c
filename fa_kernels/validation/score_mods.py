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
    H = q.shape[1]
    needs = f"({H},) or ({B}, {H}), a slope for each head of q"
    slopes = _checked_float32("alibi_slopes", alibi_slopes, q, ((H,), (B, H)), needs)
    if slopes.requires_grad:
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
    if isinstance(sinks, torch.Tensor) and sinks.layout is not torch.strided:
        raise NotImplementedError(f"sinks has layout {sinks.layout}; needs a strided tensor")
    H = q.shape[1]
    _checked_float32("sinks", sinks, q, ((H,),), f"({H},), a score for each head of q")


def _checked_float32(
    name: str, x: object, q: torch.Tensor, shapes: tuple[tuple[int, ...], ...], needs: str
) -> torch.Tensor:
    """Returns a float32 tensor of one of the shapes, on the device of q.

    Raises:
        TypeError: It is no float32 tensor.
        ValueError: Its shape or device does not match q.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; needs a float32 torch.Tensor")
    if x.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {x.dtype}; needs torch.float32")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; needs {needs}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")
    return x
