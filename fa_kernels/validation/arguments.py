"""Validation of ``flash_attention``: every error names the value it got and the value it needs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from fa_kernels.configs import CONFIGS, Config, holds_large_tiles, resolve
from fa_kernels.runtime.device_cache import cached_on_device
from fa_kernels.runtime.versions import check_held
from fa_kernels.schedule.block_sparse import (
    VISIBLE,
    BlockMaps,
    Predicate,
    block_maps,
    maps_of_blocks,
    predicate_of,
)
from fa_kernels.validation.block_mask import check_block_mask, check_tiles
from fa_kernels.validation.cu_seqlens import (
    check_entries,
    check_has_lengths,
    check_lengths,
    checked_offsets,
)
from fa_kernels.validation.opaque_handles import token_of, value_of
from fa_kernels.validation.score_mods import check_alibi, check_bias, check_sinks

__all__ = [
    "MAX_HEAD_DIM",
    "MAX_SEQLEN",
    "MLA_HEAD_DIMS",
    "Arguments",
    "MaskLike",
    "Request",
    "check",
    "check_device",
    "checked_lengths",
    "lengths_on_device",
    "prepared",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# The head_dims of keys and values of multi-head latent attention, supported in caches.
MLA_HEAD_DIMS = (576, 512)
# Positions, windows and their sums stay inside int32 in the kernels.
MAX_SEQLEN = 2**29


@runtime_checkable
class MaskLike(Protocol):
    """The attributes of an object for ``mask=``.

    A hashable mask may also have a method ``native(B, H, M, N, device)``. It returns None, or a
    predicate that hides further keys as a pair (function, args). ``function`` is a ``triton.jit``
    function of (b, h, m, n, args), with scalars b and h and tiles m and n of valid rows and keys.
    ``args`` is a tuple of ints, tensors and such tuples; bools and ints of less than 32 bits in
    tensors are widened to int32. Results are cached by the mask, and by the versions of the tensors
    that it holds. A mask that holds tensors compares by identity: ``@dataclass(eq=False)``.

    Attributes:
        causal: Whether window_right is 0.
        window_left: Keys visible before the position m + seqlen_k - seqlen_q, inclusive, >= 0; None
            is unbounded.
        window_right: Keys visible after that position, inclusive, >= 0; None is unbounded.
        seqlens_q: Valid rows, B ints; None is all.
        seqlens_k: Valid keys, B ints; None is all.
    """

    causal: bool
    window_left: int | None
    window_right: int | None
    seqlens_q: Sequence[int] | None
    seqlens_k: Sequence[int] | None


class Request(NamedTuple):
    """Checked arguments, in types that operators accept.

    In a varlen call, cumulative lengths take the place of lengths: int32 (B + 1,), or B + 1 ints.

    Args:
        seqlens_q: Valid rows, int32 (B,) on the device; None if they are ints or not given.
        seqlens_k: Valid keys, int32 (B,) on the device; None if they are ints or not given.
        block_mask: Bool (H or 1, block rows, block columns); None means all blocks.
        lengths_q: Valid rows as ints; None if they are a tensor or not given.
        lengths_k: Valid keys as ints; None if they are a tensor or not given.
        window_left: Keys visible before a query's position; None is unbounded.
        window_right: Keys visible after a query's position; None is unbounded.
        sm_scale: Factor on q.k; None is the default.
        config: A name in ``CONFIGS``, or the token of a ``Config``.
        mask: The token of a mask that may have a predicate; empty if there is none.
        block_size: Rows and keys of a block of ``block_mask``.
        one_pass: Whether the dk/dv kernel also computes dq.
        longest_q: Most rows of a sequence in a varlen call; None in a padded call.
        longest_k: Most keys of a sequence in a varlen call; None in a padded call.
        softcap: c, where a scaled score x becomes c tanh(x / c); None without a softcap.
        alibi_slopes: Float32 (H,) or (B, H) on the device; None without ALiBi.
        bias: (B or 1, H or 1, M or 1, N or 1) in the dtype of q or float32; None without a bias.
        sinks: Float32 (H,) on the device; None without sinks.
    """

    seqlens_q: torch.Tensor | None
    seqlens_k: torch.Tensor | None
    block_mask: torch.Tensor | None
    lengths_q: Sequence[int] | None
    lengths_k: Sequence[int] | None
    window_left: int | None
    window_right: int | None
    sm_scale: float | None
    config: str
    mask: str
    block_size: int
    one_pass: bool
    longest_q: int | None = None
    longest_k: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Arguments:
    """Arguments in the form that the launchers take.

    Args:
        seqlens_q: Valid rows, int32 (B,) on the device; in a varlen call cu_seqlens (B + 1,).
        seqlens_k: Valid keys, int32 (B,) on the device; in a varlen call cu_seqlens (B + 1,).
        window_left: Keys visible before a query's position, clamped to M + N.
        window_right: Keys visible after a query's position, clamped to M + N.
        sm_scale: Factor on q.k.
        config: Complete tile configuration.
        one_pass: Whether the dk/dv kernel also computes dq. Its tile is then ``config.dkdv``.
        predicate: The mask's predicate; None if it has none.
        maps: The tiles that each kernel visits under a predicate.
        longest: Most (rows, keys) of a sequence in a varlen call; None in a padded call.
        ends: Upper bound on the (rows, keys) at which the last sequence of a varlen call ends.
        softcap: c, where a scaled score x becomes c tanh(x / c); None without a softcap.
        alibi_slopes: Float32 (H,) or (B, H) on the device; None without ALiBi.
        bias: (B or 1, H or 1, M or 1, N or 1); None without a bias.
        sinks: Float32 (H,) on the device; None without sinks.
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
    longest: tuple[int, int] | None = None
    ends: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @cached_property
    def is_plain(self) -> bool:
        """Whether a window and lengths alone modify the scores of keys."""
        others = (self.predicate, self.softcap, self.alibi_slopes, self.bias)
        return all(x is None for x in others)

    @cached_property
    def launches(self) -> dict[Hashable, Any]:
        """The launches with these arguments that ``launch.hopper`` keeps."""
        return {}


def _check_tensors(q: object, k: object, v: object, dtypes: tuple[torch.dtype, ...]) -> None:
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
        if x.dtype not in dtypes:
            raise NotImplementedError(f"{name} has dtype {x.dtype}; supported are {dtypes}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; needs that of q, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached: bool) -> None:
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
    is_mla = cached and (D, v.shape[3]) == MLA_HEAD_DIMS
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] < 1:
            raise ValueError(f"{name} has head_dim 0; needs at least 1")
        if x.shape[3] > MAX_HEAD_DIM and not is_mla:
            raise NotImplementedError(
                f"{name} has head_dim {x.shape[3]}; supported are 1 to {MAX_HEAD_DIM}"
            )
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] > MAX_SEQLEN:
            raise NotImplementedError(
                f"{name} has sequence length {x.shape[2]}; supported are up to {MAX_SEQLEN}"
            )


def check_device(device: torch.device, name: str = "q") -> None:
    """Checks that the kernels can run on a device, that of the argument ``name``.

    Raises:
        NotImplementedError: It is neither a CUDA device nor the CPU under TRITON_INTERPRET=1.
    """
    if device.type == "cuda":
        return
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return
    raise NotImplementedError(
        f"{name} is on {device}; needs a CUDA device, or the CPU with TRITON_INTERPRET=1 set "
        "before Triton is imported"
    )


def _checked_bound(name: str, bound: object, *, of_mask: bool) -> int | None:
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
        raise TypeError(f"{name} is {bound!r}; needs an int or None")
    if bound == -1 and not of_mask:
        return None
    if bound is not None and bound < 0:
        unbounded = "None" if of_mask else "None or -1"
        raise ValueError(f"{name} is {bound}; needs an int >= 0, or {unbounded} for unbounded")
    return bound


def _is_unbounded(window_size: object) -> bool:
    return isinstance(window_size, tuple | list) and [
        x is None or (type(x) is int and x == -1) for x in window_size
    ] == [True, True]


def _checked_window(
    causal: object, window_size: object, *, of_mask: bool
) -> tuple[int | None, int | None]:
    """Returns (window_left, window_right) with causal folded in.

    With ``of_mask``, -1 is an error: the bounds of a mask are None or ints >= 0.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; needs a bool")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; needs a pair (window_left, window_right)")
    left = _checked_bound("window_left", window_size[0], of_mask=of_mask)
    right = _checked_bound("window_right", window_size[1], of_mask=of_mask)
    if causal and right not in (None, 0):
        raise ValueError(
            f"causal=True contradicts window_right={right}; causal means window_right=0: "
            "leave one of them out"
        )
    return left, 0 if causal else right


@cached_on_device(most=256)
def lengths_on_device(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns ints as an int32 tensor (B,) on a device."""
    # A cached tensor outlives the call, so it must not be an inference tensor.
    with torch.inference_mode(False):
        return torch.tensor(lengths, dtype=torch.int32, device=device)


def checked_lengths(
    name: str, lengths: object, B: int, size: int, device: torch.device
) -> tuple[torch.Tensor | None, tuple[int, ...] | None]:
    """Returns lengths as (int32 (B,) on the device, None) or (None, ints).

    The kernels clamp the values of a tensor.
    """
    if lengths is None:
        return None, None
    if isinstance(lengths, torch.Tensor):
        if lengths.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {lengths.dtype}; needs torch.int32")
        if tuple(lengths.shape) != (B,):
            raise ValueError(f"{name} has shape {tuple(lengths.shape)}; needs ({B},)")
        if lengths.device != device:
            raise ValueError(f"{name} is on {lengths.device}; needs the device of q, {device}")
        return lengths.contiguous(), None
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        raise TypeError(f"{name} is {lengths!r}; needs a sequence of ints or an int32 tensor")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"{name} holds {length!r}; needs ints")
        if not 0 <= length <= size:
            raise ValueError(f"{name} holds {length}; needs lengths in [0, {size}]")
    if len(lengths) != B:
        raise ValueError(f"{name} has {len(lengths)} lengths; needs one per batch entry, {B}")
    return None, tuple(lengths)


def _checked_scale(sm_scale: object, dtype: torch.dtype) -> float | None:
    if sm_scale is None:
        return None
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, float | int):
        raise TypeError(f"sm_scale is {sm_scale!r}; needs a float or None")
    if not 0 < sm_scale <= sys.float_info.max:
        raise ValueError(f"sm_scale is {sm_scale}; needs to be finite and > 0")
    # The kernels scale by sm_scale * log2(e) in this dtype; it must be neither infinite nor 0.
    scales = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    if not scales.smallest_normal <= sm_scale <= scales.max / 2:
        raise NotImplementedError(
            f"sm_scale is {sm_scale}; supported for {dtype} are "
            f"{scales.smallest_normal:.3g} to {scales.max / 2:.3g}, the range of {scales.dtype}"
        )
    return float(sm_scale)


def _checked_softcap(softcap: object, sm_scale: float, dtype: torch.dtype) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, float | int):
        raise TypeError(f"softcap is {softcap!r}; needs a float or None")
    if not 0 < softcap <= sys.float_info.max:
        raise ValueError(f"softcap is {softcap}; needs to be finite and > 0")
    # The kernels multiply by it, and by sm_scale / softcap, in this dtype.
    scales = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    for factor in (softcap, sm_scale / softcap):
        if not scales.smallest_normal <= factor <= scales.max / 2:
            raise NotImplementedError(
                f"softcap is {softcap}; for {dtype}, softcap and sm_scale / softcap are supported "
                f"from {scales.smallest_normal:.3g} to {scales.max / 2:.3g}, the range of "
                f"{scales.dtype}"
            )
    return float(softcap)


def _checked_config(config: object) -> str:
    """Returns the name of a configuration, or its token."""
    if config is None:
        return "default"
    if isinstance(config, Config):
        return token_of(config)
    if not isinstance(config, str):
        raise TypeError(f"config is {config!r}; needs a Config, a name or None")
    if config not in CONFIGS:
        raise ValueError(f"config is {config!r}; needs one of {sorted(CONFIGS)}, or a Config")
    return config


def check(
    q: object,
    k: object,
    v: object,
    *,
    mask: object,
    causal: object,
    window_size: object,
    seqlens_q: object,
    seqlens_k: object,
    block_mask: object = None,
    block_size: object = 128,
    sm_scale: object,
    deterministic: object,
    config: object,
    softcap: object = None,
    alibi_slopes: object = None,
    bias: object = None,
    sinks: object = None,
    offsets: tuple[object, object, object, object] | None = None,
    cached: bool = False,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Request:
    """Checks the arguments of ``flash_attention`` and converts them to an operator's types.

    In a varlen call, ``offsets`` is (cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k), and
    q, k and v have batch size 1. If ``cached``, k and v stand for a cache, which can have the head
    dims of multi-head latent attention. ``dtypes`` are the supported dtypes.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range or contradicts another.
        NotImplementedError: The combination is valid but not supported.
    """
    _check_tensors(q, k, v, dtypes)
    _check_shapes(q, k, v, cached)
    check_device(q.device)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}; needs a bool")
    if mask is not None:
        given = [
            name
            for name, is_default in (
                ("causal", causal is False),
                ("window_size", _is_unbounded(window_size)),
                ("seqlens_q", seqlens_q is None),
                ("seqlens_k", seqlens_k is None),
            )
            if not is_default
        ]
        if given:
            raise ValueError(
                f"mask is given together with {', '.join(given)}; needs one or the other"
            )
        if isinstance(mask, torch.Tensor) or not isinstance(mask, MaskLike):
            raise TypeError(
                f"mask is {type(mask).__name__}; needs an object with attributes causal, "
                "window_left, window_right, seqlens_q, seqlens_k"
            )
        causal, window_size = mask.causal, (mask.window_left, mask.window_right)
        seqlens_q, seqlens_k = mask.seqlens_q, mask.seqlens_k
    check_bias(bias, q, k)
    B, _, M, _ = q.shape
    left, right = _checked_window(causal, window_size, of_mask=mask is not None)
    longest_q, longest_k = None, None
    if offsets is None:
        tensor_q, ints_q = checked_lengths("seqlens_q", seqlens_q, B, M, q.device)
        tensor_k, ints_k = checked_lengths("seqlens_k", seqlens_k, B, k.shape[2], q.device)
    else:
        tensor_q, ints_q, longest_q = checked_offsets("q", *offsets[:2], q)
        tensor_k, ints_k, longest_k = checked_offsets("k", *offsets[2:], k)
        check_entries(ints_q or tensor_q, ints_k or tensor_k)
        check_lengths("q", seqlens_q, ints_q)
        check_lengths("k", seqlens_k, ints_k)
        B = len(ints_q or tensor_q) - 1
    check_alibi(alibi_slopes, q, B)
    check_sinks(sinks, q)
    sm_scale, config = _checked_scale(sm_scale, q.dtype), _checked_config(config)
    softcap = _checked_softcap(softcap, _scale_of(q, sm_scale), q.dtype)
    token = ""
    if hasattr(mask, "native"):
        if type(mask).__hash__ is None:
            raise TypeError(f"mask is {mask!r}; needs to be hashable, since it has a method native")
        if not torch.compiler.is_compiling():  # its masks hold ints, strings and tuples alone
            check_held(mask)
        token = token_of(mask)
    if block_mask is not None:
        check_block_mask(block_mask, block_size, q, k)
    return Request(
        tensor_q, tensor_k, block_mask, ints_q, ints_k, left, right, sm_scale, config, token,
        block_size, not deterministic, longest_q, longest_k, softcap, alibi_slopes, bias,
        sinks,
    )  # fmt: skip


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: Request,
    kernels: Collection[str] = BlockMaps._fields,
) -> Arguments:
    """Returns a request in the launchers' form, for the sizes and device of q, k and v.

    Block maps of a ``block_mask`` are made for the kernels in ``kernels`` alone, and those of a
    predicate unless there are none.

    Raises:
        ValueError: The mask of a varlen call has a predicate and no lengths.
        NotImplementedError: A predicate and ``block_mask`` are combined, the block size is no
            multiple of a tile, or the mask has a predicate and too many tiles.
    """
    B, H, M, D = q.shape
    N = k.shape[2]
    seqlens_q = _on_device(request.seqlens_q, request.lengths_q, B, M, q.device)
    seqlens_k = _on_device(request.seqlens_k, request.lengths_k, B, N, q.device)
    places = lengths = (seqlens_q, seqlens_k)
    longest, ends = None, None
    if request.longest_q is not None:
        B, M, N = len(seqlens_q) - 1, request.longest_q, request.longest_k
        longest = (M, N)
        ends = tuple(
            rows if offsets is None else offsets[-1]
            for rows, offsets in ((q.shape[2], request.lengths_q), (k.shape[2], request.lengths_k))
        )
    left, right = (
        M + N if x is None else min(x, M + N) for x in (request.window_left, request.window_right)
    )
    sm_scale = _scale_of(q, request.sm_scale)
    config = _resolved(
        request.config, q.dtype, D, v.shape[3], request.one_pass, holds_large_tiles(q.device)
    )
    predicate, maps = None, None
    window, sizes = (left, right), (B, H, k.shape[1], M, N)
    if request.mask:
        mask = value_of(request.mask)
        predicate = predicate_of(mask, B, H, M, N, q.device)
        if predicate is not None:
            if longest is not None:
                check_has_lengths(mask)
                lengths = tuple(
                    lengths_on_device(tuple(x), q.device) for x in (mask.seqlens_q, mask.seqlens_k)
                )
            if kernels:
                maps = block_maps(mask, *sizes, window, lengths, config)
    if request.block_mask is not None:
        if predicate is not None:
            raise NotImplementedError(
                "block_mask is given together with a mask that has a predicate; supported with it "
                "are causal, window_size and lengths"
            )
        check_tiles(request.block_size, config)
        predicate = VISIBLE
        maps = maps_of_blocks(
            request.block_mask, request.block_size, *sizes[1:], window, lengths, config, kernels
        )
    return Arguments(
        *places, *window, sm_scale, config, request.one_pass, predicate, maps, longest, ends,
        request.softcap, request.alibi_slopes, request.bias, request.sinks,
    )  # fmt: skip


def _scale_of(q: torch.Tensor, sm_scale: float | None) -> float:
    """Returns the factor on q.k: ``sm_scale`` or its default."""
    return float(q.shape[3]) ** -0.5 if sm_scale is None else sm_scale


def _on_device(
    seqlens: torch.Tensor | None,
    lengths: Sequence[int] | None,
    B: int,
    size: int,
    device: torch.device,
) -> torch.Tensor:
    """Returns lengths as int32 (B,) on the device; ``size`` for each entry if none are given."""
    if seqlens is not None:
        return seqlens
    return lengths_on_device((size,) * B if lengths is None else tuple(lengths), device)


@lru_cache(maxsize=256)
def _resolved(
    config: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, one_pass: bool, large: bool
) -> Config:
    given = CONFIGS.get(config) or value_of(config)
    tiles = resolve(given, dtype, head_dim, head_dim_v, large=large)
    return dataclasses.replace(tiles, dkdv=tiles.one_pass) if one_pass else tiles
