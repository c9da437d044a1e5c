"""Which forwards run on Hopper's own instructions, and how they are launched there.

It is never needed: where it does not take a call, the portable kernel does.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

import torch
import triton

from fa_kernels import allocation
from fa_kernels.arguments import Arguments
from fa_kernels.configs import Tile
from fa_kernels.kernels.forward import forward_kernel

__all__ = ["TILE", "is_there", "launch_hopper_forward", "takes", "takes_shapes"]

TILE = Tile(128, 128, 4, 2)
# Keys and values together; shared memory has room for one query tile beside them.
_STAGES = {64: 3, 128: 2}
_NARROWEST, _WIDEST = 32, 128
# Bytes between what a descriptor counts.
_ALIGNMENT = 16


def _padded(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


@lru_cache(maxsize=1)
def _descriptors() -> tuple[type, object]:
    """Triton's class of descriptors, and how tiles lie in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor, layout


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    """The module of the kernel; None where Triton has no Gluon, or not what the kernel takes."""
    # Where the interpreter runs the kernels there is none for this one.
    if not isinstance(forward_kernel, triton.JITFunction):
        return None
    try:
        return importlib.import_module("fa_kernels.kernels.hopper_forward")
    except (ImportError, AttributeError):
        return None


@lru_cache(maxsize=64)
def is_there(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, and Triton compiles for it what the kernel is made of."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and _kernels() is not None


def takes_shapes(dtype: torch.dtype, D: int, Dv: int) -> bool:
    """Whether head_dims and dtype are such that tiles can be copied whole."""
    return dtype in (torch.float16, torch.bfloat16) and all(
        _NARROWEST < dim <= _WIDEST and dim * dtype.itemsize % _ALIGNMENT == 0 for dim in (D, Dv)
    )


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Arguments) -> bool:
    """Whether the forward of a call runs here; strides have no say, so that bits do not follow."""
    return (
        arguments.config.hopper
        and arguments.config.splits is None
        and arguments.predicate is None
        and arguments.longest is None
        and arguments.softcap is None
        and arguments.alibi_slopes is None
        and arguments.bias is None
        and takes_shapes(q.dtype, q.shape[3], v.shape[3])
        and min(q.numel(), k.numel()) > 0
        and is_there(q.device)
    )


def _copied(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy where a descriptor cannot count its strides."""
    size = x.element_size()
    strides = [step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    fits = all(step > 0 and step * size % _ALIGNMENT == 0 for step in strides)
    if fits and x.stride(-1) == 1 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return allocation.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _described(x: torch.Tensor, rows: int) -> object:
    """A tensor (B, H, rows, head_dim) in blocks of so many rows and all columns."""
    descriptor, layout = _descriptors()
    x = _copied(x)
    columns = _padded(x.shape[3])
    # The stride of what is alone is never counted, but has to be one.
    strides = [step if n > 1 else columns for n, step in zip(x.shape, x.stride(), strict=True)]
    return descriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, columns], layout)


def launch_hopper_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: Arguments,
    sm_scale_bits: int,
) -> None:
    """Writes out and lse of a call that ``takes`` is true of, on the current device."""
    kernels = _kernels()
    assert kernels is not None
    B, H, M, D = q.shape
    _, Hk, N, Dv = v.shape
    kernels.hopper_forward_kernel[(triton.cdiv(M, TILE.block_m) * B * H,)](
        _described(q, kernels.HALF_ROWS), _described(k, TILE.block_n), _described(v, TILE.block_n),
        out, lse, arguments.seqlens_q, arguments.seqlens_k, H, H // Hk, M, N, Dv,
        arguments.window_left, arguments.window_right, sm_scale_bits,
        STAGES=_STAGES[_padded(max(D, Dv))], ALIGNED=Dv == _padded(Dv),
        num_warps=TILE.num_warps,
    )  # fmt: skip
