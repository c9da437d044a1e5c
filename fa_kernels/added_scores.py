"""Validation of what is added to scores: ``alibi_slopes``."""

from __future__ import annotations

import torch

__all__ = ["check_alibi"]


def check_alibi(alibi_slopes: object, q: torch.Tensor) -> None:
    """Checks ``alibi_slopes`` of ``flash_attention``; q is checked.

    Raises:
        TypeError: It is no float32 tensor.
        ValueError: It has another shape or device than q asks for.
        NotImplementedError: It asks for a gradient.
    """
    if alibi_slopes is None:
        return
    if not isinstance(alibi_slopes, torch.Tensor):
        raise TypeError(
            f"alibi_slopes is {type(alibi_slopes).__name__}; needs a float32 torch.Tensor"
        )
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {alibi_slopes.dtype}; needs torch.float32")
    B, H = q.shape[:2]
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
        raise NotImplementedError(
            "alibi_slopes asks for a gradient; supported are slopes that do not, as detached ones"
        )
