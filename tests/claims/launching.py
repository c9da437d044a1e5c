"""Runs forward and backward of a package of kernels, the project's own or an edited copy."""

from __future__ import annotations

from types import ModuleType

import torch

from fa_verify.oracles.outputs import Outputs

__all__ = ["arguments", "differentiate", "tensors"]

CONFIG = "16x16"


def tensors(device: str, dtype: torch.dtype, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Matrices (rows, columns) as tensors of one batch entry and one head, rounded to a dtype."""
    return tuple(x[None, None].to(device, dtype) for x in matrices)


def differentiate(
    package: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    **options: object,
) -> Outputs[torch.Tensor]:
    """All five outputs of the package's ``flash_attention``, on tiles of 16 x 16."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = package.flash_attention(*leaves, return_lse=True, config=CONFIG, **options)
    return Outputs(out.detach(), lse, *torch.autograd.grad(out, leaves, dout))


def arguments(
    package: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> object:
    """Validated arguments for the package's launchers, with tiles of 16 x 16."""
    given = {
        "mask": None,
        "causal": False,
        "window_size": (None, None),
        "seqlens_q": None,
        "seqlens_k": None,
        "sm_scale": None,
        "deterministic": True,
        "config": CONFIG,
    }
    checks = package.validation.arguments
    request = checks.check(q, k, v, **(given | options))
    return checks.prepared(q, k, v, request)
