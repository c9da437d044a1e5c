"""Launches the forward of e4m3 tensors with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa_kernels.kernels.portable.forward_fp8 import columns_kernel, forward_fp8_kernel
from fa_kernels.launch.named_arguments import (
    alignment,
    blank,
    length_args,
    padded,
    predicate_args,
    score_args,
    stride_args,
    tile_args,
    window_args,
)
from fa_kernels.launch.sinks import sink_args
from fa_kernels.launch.sizes import Sizes
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.launch_cache import cdiv, run
from fa_kernels.validation.arguments import Arguments

__all__ = ["IMPRECISE", "Scales", "launch_forward_fp8"]

# Products that a tensor core of Hopper adds in 13 bits before a sum in float32, by ``accumulator``.
# 0 does not use the instruction of 8 bits; None adds all products so.
IMPRECISE = {"fp32": 0, "promoted": 32, "tensor_core": None}
# Columns of the smallest tile of a product of 8 bits.
_LEAST_COLUMNS = 32


class Scales(NamedTuple):
    """Float32 scales that multiply the codes, with a stride of 0 along axes that share them.

    Args:
        q: (B, H, M).
        k: (B, Hk, N).
        v: (B, Hk).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _padded(head_dim: int) -> int:
    return max(_LEAST_COLUMNS, padded(head_dim))


def _scale_strides(scales: Scales, varlen: bool) -> dict[str, int]:
    """Returns strides of (entry, head, row); in a varlen call, an entry of q and k is a row."""
    named: dict[str, int] = {}
    for name, x in scales._asdict().items():
        strides = x.stride()
        if varlen and name != "v":
            strides = (strides[2], *strides[1:])
        axes = ("entry", "head", "row")[: x.ndim]
        named |= {f"{name}_scale_{axis}": step for axis, step in zip(axes, strides, strict=True)}
    return named


def _columns(v: torch.Tensor, sizes: Sizes, arguments: Arguments, block_n: int) -> torch.Tensor:
    """Returns v by columns: (B Hk columns, keys) in whole tiles; (Hk columns, keys) if packed."""
    varlen = arguments.longest is not None
    keys_padded = (cdiv(sizes.total_k, block_n) + (sizes.B if varlen else 0)) * block_n
    width = _padded(sizes.Dv)
    columns = allocation.empty(
        ((1 if varlen else sizes.B) * sizes.Hk * width, keys_padded), dtype=v.dtype, device=v.device
    )
    tiles = sizes.key_tiles(block_n)
    if tiles.number:
        with on_device(v):
            run(
                columns_kernel, (tiles.number,),
                {
                    "v_ptr": v, "columns_ptr": columns, "seqlens_k_ptr": arguments.seqlens_k,
                    **tiles.in_kernels(), **stride_args(arguments, v=v), "Hk": sizes.Hk,
                    "N": sizes.N, "total_k": sizes.total_k, "Dv": sizes.Dv,
                    "keys_padded": keys_padded, "BLOCK_N": block_n, "BLOCK_DV": width,
                    "ALIGNED": alignment(v), "VARLEN": varlen, "num_warps": 4, "num_stages": 1,
                },
            )  # fmt: skip
    return columns


def launch_forward_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: Scales,
    arguments: Arguments,
    *,
    dtype: torch.dtype,
    accumulator: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B,H,M,Dv) in ``dtype`` and lse (B,H,M), float32."""
    B, H, M, _ = q.shape
    out = allocation.empty((B, H, M, v.shape[3]), dtype=dtype, device=q.device)
    lse = allocation.empty((B, H, M), dtype=torch.float32, device=q.device)
    blank(arguments, out=out, lse=lse)
    sizes = Sizes.of(q, k, v, arguments)
    tile = arguments.config.forward
    tiles = sizes.query_tiles(tile.block_m)
    varlen = arguments.longest is not None
    if not tiles.number:
        return out, lse
    columns = _columns(v, sizes, arguments, tile.block_n)
    # Rows of out are written 8 columns at a time.
    aligned = alignment(q, k) if sizes.Dv % 8 == 0 else 0
    with on_device(q):
        run(
            forward_fp8_kernel, (tiles.number,),
            {
                "q_ptr": q, "k_ptr": k, "columns_ptr": columns, "out_ptr": out, "lse_ptr": lse,
                "q_scale_ptr": scales.q, "k_scale_ptr": scales.k, "v_scale_ptr": scales.v,
                **length_args(arguments), **tiles.in_kernels(),
                **stride_args(arguments, q=q, k=k), "keys_padded": columns.shape[1],
                **_scale_strides(scales, varlen),
                **sizes.in_kernels(), **window_args(arguments),
                **predicate_args(arguments, "forward"), **score_args(arguments),
                **sink_args(arguments),
                "ALIGNED": aligned, "VARLEN": varlen,
                "BLOCK_D": _padded(sizes.D), "BLOCK_DV": _padded(sizes.Dv),
                "PREDICATE": None if arguments.predicate is None else arguments.predicate.function,
                "OF_TOKENS": scales.k.stride(2) != 0, "IMPRECISE": IMPRECISE[accumulator],
                **tile_args(tile),
            },
        )  # fmt: skip
    return out, lse
