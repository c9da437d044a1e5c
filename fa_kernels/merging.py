"""The public function that merges attention states, and the validation of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa_kernels import operators
from fa_kernels.validation import arguments

__all__ = ["MAX_MERGED_DIM", "combine_attention_states"]

# The head_dim of the values of multi-head latent attention.
MAX_MERGED_DIM = 512
_AXES = {"outs": "(P, B, H, M, Dv)", "lses": "(P, B, H, M)"}


def combine_attention_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the results of attention to parts of the keys into the result for all keys.

    Each part is what ``flash_attention(q, k_p, v_p, return_lse=True)`` returns for its own keys::

        lse = log sum_p exp(lse_p)
        out = sum_p exp(lse_p - lse) out_p

    A part whose lse is -inf saw no key. It changes nothing, whatever its out holds, and gets zero
    gradients. A row in which no part saw a key gives out = 0 and lse = -inf, and its gradients are
    ignored. A part alone gives its own out and lse to the bit. If an lse is NaN or +inf, out and
    lse of the row are NaN.

    Args:
        outs: (P, B, H, M, Dv), fp16, bf16, fp32 or float64; or a sequence of P tensors
            (B, H, M, Dv), which are stacked in a copy. Dv is 1 to 512. A tensor can have any
            strides, and P, B or M can be 0.
        lses: (P, B, H, M), natural logarithms, float32 (float64 if outs are float64); or a sequence
            of P tensors (B, H, M).

    Returns:
        out (B, H, M, Dv) in the dtype of outs and lse (B, H, M) in the dtype of lses, both
        contiguous and differentiable with respect to outs and lses.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it and what it needs.
        NotImplementedError: The arguments are valid but not supported.

    Numerics: shares, their sum and the sum of outs are float32 (float64 for float64). out is
    rounded once, at its end. ``oracles/bounds/merging.py`` derives the bound.

    Source: Liu, Zaharia, Abbeel, Ring Attention (arXiv:2310.01889); Flash-Decoding (2023).
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    for name, x in (("outs", outs), ("lses", lses)):
        if x.layout is not torch.strided:
            raise NotImplementedError(f"{name} has layout {x.layout}; needs a strided tensor")
        if x.ndim != len(_AXES[name].split()):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs the axes {_AXES[name]}")
    if outs.dtype not in arguments.DTYPES:
        raise NotImplementedError(f"outs has dtype {outs.dtype}; supported are {arguments.DTYPES}")
    of_lses = torch.float64 if outs.dtype == torch.float64 else torch.float32
    if lses.dtype != of_lses:
        raise ValueError(f"lses has dtype {lses.dtype}; needs {of_lses}, as outs has {outs.dtype}")
    if lses.shape != outs.shape[:4]:
        needed = tuple(outs.shape[:4])
        raise ValueError(f"lses has shape {tuple(lses.shape)}; needs that of outs, {needed}")
    if lses.device != outs.device:
        raise ValueError(f"lses is on {lses.device}; needs the device of outs, {outs.device}")
    if outs.shape[4] < 1:
        raise ValueError("outs has head_dim 0; needs at least 1")
    if outs.shape[4] > MAX_MERGED_DIM:
        raise NotImplementedError(
            f"outs has head_dim {outs.shape[4]}; supported are 1 to {MAX_MERGED_DIM}"
        )
    arguments.check_device(outs.device, "outs")
    return operators.run_combine(outs, lses)


def _stacked(name: str, parts: object) -> torch.Tensor:
    """Returns parts as one tensor: the tensor itself, or a sequence of tensors stacked.

    Raises:
        TypeError: It is neither a tensor nor a sequence of tensors.
        ValueError: It is empty, or its tensors differ in shape, dtype or device.
    """
    if isinstance(parts, torch.Tensor):
        return parts
    needs = f"needs a torch.Tensor {_AXES[name]} or a sequence of tensors"
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes):
        raise TypeError(f"{name} is {type(parts).__name__}; {needs}")
    if not parts:
        raise ValueError(f"{name} is an empty sequence; {needs}, at least one")
    for place, x in enumerate(parts):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}[{place}] is {type(x).__name__}; needs a torch.Tensor")
        for word, got, needed in (
            ("shape", tuple(x.shape), tuple(parts[0].shape)),
            ("dtype", x.dtype, parts[0].dtype),
            ("device", x.device, parts[0].device),
        ):
            if got != needed:
                raise ValueError(
                    f"{name}[{place}] has {word} {got}; needs that of part 0, {needed}"
                )
    return torch.stack(list(parts))
