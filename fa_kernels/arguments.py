"""Validation of ``flash_attention``: every error names what it got and what it needs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch

from fa_kernels.block_map import (
    VISIBLE,
    BlockMaps,
    Predicate,
    block_maps,
    maps_of_blocks,
    predicate_of,
)
from fa_kernels.block_mask import check_block_mask
from fa_kernels.configs import Config, resolve

__all__ = ["Arguments", "MaskLike", "check"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# Positions, windows and their sums stay inside int32 in the kernels.
MAX_SEQLEN = 2**29


@runtime_checkable
class MaskLike(Protocol):
    """The attributes that ``mask=`` is read by.

    causal: bool. window_left, window_right: int >= 0, or None for unbounded, both inclusive around
    the position m + seqlen_k - seqlen_q. seqlens_q, seqlens_k: B ints, or None for full.

    A hashable mask may also have a method native(B, H, M, N, device) that returns None, or what
    else hides a key, as (jit function of (b, h, m, n, args), args): a ``triton.jit`` predicate of
    scalars b and h and of tiles m and n of valid rows and keys, and a tuple of ints, of tensors
    (bools and ints of less than 32 bits arrive as int32) and of such tuples.
    """

    causal: bool
    window_left: int | None
    window_right: int | None
    seqlens_q: Sequence[int] | None
    seqlens_k: Sequence[int] | None


@dataclass(frozen=True)
class Arguments:
    """Checked arguments in the form that the launchers take.

    Args:
        seqlens_q: int32 (B,) on the device.
        seqlens_k: int32 (B,) on the device.
        window_left: Keys visible before the own position, clamped to M + N.
        window_right: Keys visible after the own position, clamped to M + N.
        sm_scale: Factor on q.k.
        config: Complete tile configuration.
        one_pass: Whether dq comes out of the pass that dk and dv do; the tile of that pass is then
            config.dkdv.
        predicate: What else hides a key, of a mask that has that.
        maps: The tiles that each kernel then visits.
    """

    seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    window_left: int
    window_right: int
    sm_scale: float
    config: Config
    one_pass: bool = False
    predicate: Predicate | None = None
    maps: BlockMaps | None = None


def _check_tensors(q: object, k: object, v: object) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; needs a torch.Tensor")
        if x.layout is not torch.strided:
            raise NotImplementedError(f"{name} has layout {x.layout}; needs a strided tensor")
        if x.ndim != 4:
            axes = "(B, H, M, D)" if name == "q" else "(B, Hk, N, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs four axes {axes}")
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"{name} has dtype {x.dtype}; supported are {DTYPES}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; needs that of q, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    B, H, _, D = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != B:
            raise ValueError(f"{name} has batch size {x.shape[0]}; needs that of q, {B}")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; needs the heads and keys of k, {tuple(k.shape)}"
        )
    if H < 1 or k.shape[1] < 1:
        raise ValueError(f"q has {H} heads and k has {k.shape[1]}; needs at least one each")
    if H % k.shape[1]:
        raise ValueError(f"q has {H} heads; needs a multiple of the {k.shape[1]} heads of k and v")
    if k.shape[3] != D:
        raise ValueError(f"k has head_dim {k.shape[3]}; needs that of q, {D}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] < 1:
            raise ValueError(f"{name} has head_dim 0; needs at least 1")
        if x.shape[3] > MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name} has head_dim {x.shape[3]}; supported are 1 to {MAX_HEAD_DIM}"
            )
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] > MAX_SEQLEN:
            raise NotImplementedError(
                f"{name} has sequence length {x.shape[2]}; supported are up to {MAX_SEQLEN}"
            )


def _check_device(device: torch.device) -> None:
    if device.type == "cuda":
        return
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return
    raise NotImplementedError(
        f"q is on {device}; needs a CUDA device, or the CPU with TRITON_INTERPRET=1 set before "
        "Triton is imported"
    )


def _checked_bound(name: str, bound: object) -> int | None:
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
        raise TypeError(f"{name} is {bound!r}; needs an int or None")
    if bound is not None and bound < 0:
        raise ValueError(f"{name} is {bound}; needs an int >= 0, or None for unbounded")
    return bound


def _is_unbounded(window: object) -> bool:
    return isinstance(window, tuple | list) and [x is None for x in window] == [True, True]


def _checked_window(causal: object, window: object) -> tuple[int | None, int | None]:
    """(window_left, window_right) with causal folded in."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; needs a bool")
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}; needs a pair (window_left, window_right)")
    left = _checked_bound("window_left", window[0])
    right = _checked_bound("window_right", window[1])
    if causal and right not in (None, 0):
        raise ValueError(
            f"causal=True contradicts window_right={right}; causal means window_right=0: "
            "leave one of them out"
        )
    return left, 0 if causal else right


@lru_cache(maxsize=256)
def _lengths_on_device(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # A cached tensor outlives the call: it must be an ordinary one, also under inference_mode.
    with torch.inference_mode(False):
        return torch.tensor(lengths, dtype=torch.int32, device=device)


def _checked_lengths(
    name: str, lengths: object, B: int, size: int, device: torch.device
) -> torch.Tensor:
    """Lengths as int32 (B,) on the device; a tensor's values are clamped in the kernels."""
    if lengths is None:
        return _lengths_on_device((size,) * B, device)
    if isinstance(lengths, torch.Tensor):
        if lengths.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {lengths.dtype}; needs torch.int32")
        if tuple(lengths.shape) != (B,):
            raise ValueError(f"{name} has shape {tuple(lengths.shape)}; needs ({B},)")
        if lengths.device != device:
            raise ValueError(f"{name} is on {lengths.device}; needs the device of q, {device}")
        return lengths.contiguous()
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        raise TypeError(f"{name} is {lengths!r}; needs a sequence of ints or an int32 tensor")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"{name} holds {length!r}; needs ints")
        if not 0 <= length <= size:
            raise ValueError(f"{name} holds {length}; needs lengths in [0, {size}]")
    if len(lengths) != B:
        raise ValueError(f"{name} has {len(lengths)} lengths; needs one per batch entry, {B}")
    return _lengths_on_device(tuple(lengths), device)


def _checked_scale(sm_scale: object, D: int, dtype: torch.dtype) -> float:
    if sm_scale is None:
        return float(D) ** -0.5
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, float | int):
        raise TypeError(f"sm_scale is {sm_scale!r}; needs a float or None")
    if not 0 < sm_scale <= sys.float_info.max:
        raise ValueError(f"sm_scale is {sm_scale}; needs to be finite and > 0")
    # The kernels scale by sm_scale * log2(e) in this dtype: neither infinite nor 0.
    scales = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    if not scales.smallest_normal <= sm_scale <= scales.max / 2:
        raise NotImplementedError(
            f"sm_scale is {sm_scale}; supported for {dtype} are "
            f"{scales.smallest_normal:.3g} to {scales.max / 2:.3g}, the range of {scales.dtype}"
        )
    return float(sm_scale)


def check(
    q: object,
    k: object,
    v: object,
    *,
    mask: object,
    causal: object,
    window: object,
    seqlens_q: object,
    seqlens_k: object,
    block_mask: object = None,
    block_size: object = 128,
    sm_scale: object,
    backward: object,
    config: Config | str | None,
) -> Arguments:
    """Checks the arguments of ``flash_attention`` and brings them into the launchers' form.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range or contradicts another.
        NotImplementedError: The combination is valid but not supported.
    """
    _check_tensors(q, k, v)
    _check_shapes(q, k, v)
    _check_device(q.device)
    if backward not in ("two_pass", "one_pass"):
        raise ValueError(f"backward is {backward!r}; needs 'two_pass' or 'one_pass'")
    if mask is not None:
        given = [
            name
            for name, is_default in (
                ("causal", causal is False),
                ("window", _is_unbounded(window)),
                ("seqlens_q", seqlens_q is None),
                ("seqlens_k", seqlens_k is None),
            )
            if not is_default
        ]
        if given:
            raise ValueError(f"mask is given together with {', '.join(given)}; needs one or other")
        if isinstance(mask, torch.Tensor) or not isinstance(mask, MaskLike):
            raise TypeError(
                f"mask is {type(mask).__name__}; needs an object with attributes causal, "
                "window_left, window_right, seqlens_q, seqlens_k"
            )
        causal, window = mask.causal, (mask.window_left, mask.window_right)
        seqlens_q, seqlens_k = mask.seqlens_q, mask.seqlens_k
    B, H, M, D = q.shape
    N = k.shape[2]
    left, right = _checked_window(causal, window)
    block_d = 1 << (max(D, v.shape[3], 16) - 1).bit_length()
    tiles = resolve(config, q.dtype, block_d)
    one_pass = backward == "one_pass"
    arguments = Arguments(
        seqlens_q=_checked_lengths("seqlens_q", seqlens_q, B, M, q.device),
        seqlens_k=_checked_lengths("seqlens_k", seqlens_k, B, N, q.device),
        window_left=M + N if left is None else min(left, M + N),
        window_right=M + N if right is None else min(right, M + N),
        sm_scale=_checked_scale(sm_scale, D, q.dtype),
        config=dataclasses.replace(tiles, dkdv=tiles.one_pass) if one_pass else tiles,
        one_pass=one_pass,
    )
    sizes, lengths = (H, M, N), (arguments.seqlens_q, arguments.seqlens_k)
    window = (arguments.window_left, arguments.window_right)
    predicate = _predicate_of(mask, B, *sizes, q.device)
    if block_mask is not None:
        check_block_mask(block_mask, block_size, q, k, arguments.config)
        if predicate is not None:
            raise NotImplementedError(
                "block_mask is given together with a mask that has a predicate; supported beside "
                "it are causal, window and lengths"
            )
        predicate = VISIBLE
        maps = maps_of_blocks(block_mask, block_size, *sizes, window, lengths, arguments.config)
    elif predicate is not None:
        maps = block_maps(mask, B, *sizes, window, lengths, arguments.config)
    else:
        return arguments
    return dataclasses.replace(arguments, predicate=predicate, maps=maps)


def _predicate_of(
    mask: object, B: int, H: int, M: int, N: int, device: torch.device
) -> Predicate | None:
    """What a mask has beside lengths and window; None if nothing."""
    if not hasattr(mask, "native"):
        return None
    if type(mask).__hash__ is None:
        raise TypeError(f"mask is {mask!r}; needs to be hashable, since it has a method native")
    return predicate_of(mask, B, H, M, N, device)
