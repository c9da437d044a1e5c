"""Launches the kernels for Hopper, and decides which calls run on them.

All other calls run on the portable kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from fa_kernels.kernels.portable.forward import forward_kernel
from fa_kernels.launch.sinks import sink_args
from fa_kernels.launch.sizes import ROW_PADDING, Sizes
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.launch_cache import cdiv, run
from fa_kernels.validation.arguments import Arguments

__all__ = [
    "absence",
    "forward_tile",
    "is_there",
    "launch_hopper_backward",
    "launch_hopper_dq",
    "launch_hopper_forward",
    "padded",
    "processors",
    "programs_together",
    "query_tiles",
    "require",
    "takes",
    "takes_shapes",
    "tile_shares",
]

# Warps of a warpgroup, and the rows or keys of a tile that one warpgroup owns.
_WARPS = 4
_WARPGROUP_ROWS = 64
_KEYS = 128
# Consumer warpgroups of the forward, by the columns of values.
_CONSUMERS = {64: 3, 128: 2}
# Rows of a query tile in the backward, by head_dim.
_BACKWARD_ROWS = {64: 128, 128: 64}
# Pipeline stages of K and V in the forward; shared memory also holds one query tile.
_STAGES = {64: 3, 128: 2}
# Pipeline stages of Q and dO in the backward; K and V stay in shared memory.
_BACKWARD_STAGES = 2
# Pipeline stages of K and V in the dq kernel; Q and dO stay in shared memory.
_DQ_STAGES = {64: 4, 128: 2}
# Stream-K: the most shares that a tile is divided into, and the cost of a share in tile times.
_SHARES = 12
_COST_OF_SHARE = 0.01
_NARROWEST, _WIDEST = 32, 128
# Launches that the arguments of a call keep.
_LAUNCHES = 64
# Their first parameters, which differ between calls or are tensors of ``Arguments``: descriptors,
# out, lse, lengths and counter.
_TENSORS = 8
# Alignment in bytes of a TMA descriptor's address and strides.
_ALIGNMENT = 16


def padded(*head_dims: int) -> int:
    """Returns the columns of the tiles, 64 or 128."""
    return 64 if max(head_dims) <= 64 else 128


def forward_tile(Dv: int) -> tuple[int, int]:
    """Returns (rows, keys) of a tile of the forward; narrow tiles have WARPGROUP_ROWS rows less."""
    return _CONSUMERS[padded(Dv)] * _WARPGROUP_ROWS, _KEYS


@lru_cache(maxsize=1)
def _descriptors() -> tuple[type, object]:
    """Returns Triton's class of TMA descriptors, and the layout of tiles in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tiles = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor, tiles


@lru_cache(maxsize=1)
def _imported() -> tuple[tuple[Any, Any, Any] | None, str]:
    """Returns the (forward, backward, dq) kernels, or None and the reason why they are absent."""
    # Triton's interpreter does not run Gluon.
    if not isinstance(forward_kernel, triton.JITFunction):
        return None, "Triton's interpreter runs the kernels, and it has no Gluon"
    try:
        forward = importlib.import_module("fa_kernels.kernels.hopper.forward")
        backward = importlib.import_module("fa_kernels.kernels.hopper.backward")
        dq = importlib.import_module("fa_kernels.kernels.hopper.dq")
    except (ImportError, AttributeError) as error:
        reason = f"Triton {triton.__version__} lacks a part of Gluon that they need: {error}"
        return None, reason
    kernels = forward.hopper_forward_kernel, backward.hopper_backward_kernel, dq.hopper_dq_kernel
    return kernels, ""


def _kernels() -> tuple[Any, Any, Any] | None:
    """Returns the (forward, backward, dq) kernels, or None if they are absent."""
    return _imported()[0]


def absence(device: torch.device) -> str:
    """Returns the reason why a device has no kernels for Hopper; empty if it has them."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"q is on {device}; they need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"{device} has compute capability {major}.{minor}; they need 9.0"
    return _imported()[1]


@lru_cache(maxsize=64)
def is_there(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU and the installed Triton has what the kernels need."""
    return not absence(device)


def require(device: torch.device) -> None:
    """Refuses a device without kernels for Hopper.

    Raises:
        RuntimeError: The kernels are absent; the message says why.
    """
    if not is_there(device):
        raise RuntimeError(
            f"config is 'hopper', but the kernels for Hopper are absent: {absence(device)}; "
            "config='default' falls back to the portable kernels"
        )


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Returns the number of programs that a GPU runs at a time: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=512)
def takes_shapes(dtype: torch.dtype, D: int, Dv: int) -> bool:
    """Whether the kernels support the dtype and head_dims: TMA has to copy whole tiles."""
    return dtype in (torch.float16, torch.bfloat16) and all(
        _NARROWEST < dim <= _WIDEST and dim * dtype.itemsize % _ALIGNMENT == 0 for dim in (D, Dv)
    )


def takes(q: torch.Tensor, sizes: Sizes, arguments: Arguments) -> bool:
    """Whether the backward of a call runs on the kernels for Hopper.

    The choice does not depend on strides, so the bits of results do not either.
    """
    return (
        arguments.config.hopper
        and arguments.is_plain
        and takes_shapes(q.dtype, sizes.D, sizes.Dv)
        and min(sizes.B, sizes.H, sizes.M, sizes.N) > 0
        and is_there(q.device)
    )


def _described(x: torch.Tensor, rows: int, columns: int) -> object:
    """Returns a TMA descriptor of a tensor (B, H, rows, head_dim), with blocks (rows, columns).

    It describes a contiguous copy if TMA does not support the tensor's strides or alignment.
    """
    counted = _counted(x.shape, x.stride(), x.element_size())
    if counted is None or x.data_ptr() % _ALIGNMENT:
        x = allocation.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        counted = list(x.shape), list(x.stride())
    shape, strides = counted
    return _descriptor(
        base=x, shape=shape, strides=strides, block_shape=[1, 1, rows, columns],
        layout=_descriptors()[1],
    )  # fmt: skip


def _descriptor(**fields: Any) -> object:
    """Returns a TMA descriptor without the checks of its class: they take half a launch's time."""
    made = object.__new__(_descriptors()[0])
    made.__dict__ = fields
    return made


@lru_cache(maxsize=1024)
def _counted(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> tuple[list[int], list[int]] | None:
    """Returns shape and strides for a descriptor; None if TMA does not support the strides."""
    # The stride of an axis of size 1 is never used, but has to be valid.
    steps = [_ALIGNMENT if shape[axis] == 1 else strides[axis] for axis in range(3)]
    fits = strides[3] == 1 and all(step * size % _ALIGNMENT == 0 for step in steps)
    return (list(shape), [*steps, 1]) if fits else None


def _alike(sizes: Sizes, arguments: Arguments) -> bool:
    """Whether all tiles take equally long, apart from padding."""
    is_open = arguments.window_left == arguments.window_right == sizes.M + sizes.N
    return is_open and arguments.longest is None


@lru_cache(maxsize=1024)
def query_tiles(M: int, heads: int, consumers: int, places: int, alike: bool) -> tuple[int, int]:
    """Returns (tiles, narrow): query tiles of a head, and how many have one consumer less.

    The number of tiles is minimal. If all tiles take equally long (``alike``), it is the largest
    that needs no more rounds on ``places`` multiprocessors, because narrow tiles end earlier.
    """
    blocks = cdiv(M, _WARPGROUP_ROWS)
    tiles = cdiv(blocks, consumers)
    if alike:
        rounds = cdiv(tiles * heads, places)
        tiles = max(tiles, min(rounds * places // heads, cdiv(blocks, consumers - 1)))
    return tiles, min(tiles * consumers - blocks, tiles)


def programs_together(programs: int, places: int, alike: bool) -> int:
    """Returns ``together`` of ``tile_of_head`` for the forward.

    The programs that begin last should be short. In fewer than three rounds on ``places``
    multiprocessors, the longest tiles of more heads do not fit together better than those of fewer.
    """
    return 256 if alike or programs < 3 * places else 512


@lru_cache(maxsize=1024)
def tile_shares(tiles: int, places: int) -> tuple[int, int]:
    """Returns ``each`` and ``shares`` of ``share_of``, if all tiles take equally long.

    The tiles left over after the full rounds on ``places`` multiprocessors are shared. One of two
    programs that share a tile waits for the other, so at least one round has to be full.
    """
    rounds, left = divmod(tiles, places)
    found = 1 + _COST_OF_SHARE, 1, 1
    for shares in range(2, _SHARES + 1):
        each = places // shares
        if rounds and left and each:
            time = cdiv(left, each) / shares + shares * _COST_OF_SHARE
            found = min(found, (time, each, shares))
    return found[1:]


def _partition(
    tiles: int, rows: int, columns: int, like: torch.Tensor, arguments: Arguments, alike: bool
) -> tuple[int, dict[str, Any]]:
    """Returns the number of programs for ``tiles``, and the arguments of the stream-K partition.

    A shared tile has partial sums (rows, columns), with the dtype and device of ``like``, and two
    signals. Without shared tiles, the pointers are placeholders that no kernel accesses.
    """
    each, shares = tile_shares(tiles, processors(like.device)) if alike else (1, 1)
    shared = each * (shares - 1)
    sums, signals = like, arguments.seqlens_q
    if shared:
        sums = allocation.empty((shared, rows, columns), dtype=like.dtype, device=like.device)
        signals = allocation.empty((shared, 2), dtype=torch.int32, device=like.device).zero_()
    named = {"sums_ptr": sums, "signals_ptr": signals, "each": each, "shares": shares}
    return tiles + shared, named


def _sizes(sizes: Sizes) -> dict[str, int]:
    """Returns the sizes of a call by the names of the kernels' parameters."""
    return {
        "H": sizes.H, "G": sizes.H // sizes.Hk, "M": sizes.M, "N": sizes.N,
        "total_q": sizes.total_q, "total_k": sizes.total_k,
    }  # fmt: skip


def _masked(arguments: Arguments) -> dict[str, Any]:
    """Returns lengths and window of a call by the names of the kernels' parameters."""
    return {
        "seqlens_q_ptr": arguments.seqlens_q, "seqlens_k_ptr": arguments.seqlens_k,
        "window_left": arguments.window_left, "window_right": arguments.window_right,
        "VARLEN": arguments.longest is not None,
    }  # fmt: skip


class _Launch(NamedTuple):
    """A launch of the forward's compiled code, without the tensors of one call.

    Args:
        run: Launches the code with arguments in the order of the kernel's parameters.
        fields: The fields of the descriptors of q, k and v, except for the tensors.
        takes_turns: Whether programs take their tiles from a counter.
        rest: The arguments after the counter.
    """

    run: Callable[..., None]
    fields: tuple[dict[str, Any], ...]
    takes_turns: bool
    rest: tuple[Any, ...]


def launch_hopper_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: Arguments,
    sm_scale_bits: int,
) -> bool:
    """Writes out and lse if a call runs on the kernel for Hopper; returns whether it does.

    ``arguments`` keeps the launch for the next call with such tensors.
    """
    if not is_there(q.device):
        return False
    # The shapes of q and v determine the shape of k.
    key = (
        q.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _ALIGNMENT,
    )  # fmt: skip
    launch = arguments.launches.get(key)
    if launch is None:
        return _launch_new_forward(key, q, k, v, out, lse, arguments, sm_scale_bits)
    of_q, of_k, of_v = launch.fields
    with on_device(q):
        launch.run(
            _descriptor(base=q, **of_q), _descriptor(base=k, **of_k), _descriptor(base=v, **of_v),
            out, lse, arguments.seqlens_q, arguments.seqlens_k,
            _counter(arguments, launch.takes_turns), *launch.rest,
        )  # fmt: skip
    return True


def _counter(arguments: Arguments, takes_turns: bool) -> torch.Tensor:
    """Returns a new counter, which starts at 0; a placeholder unless programs take turns."""
    if not takes_turns:
        return arguments.seqlens_q
    return allocation.empty((1,), dtype=torch.int32, device=arguments.seqlens_q.device).zero_()


def _launch_new_forward(
    key: Hashable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: Arguments,
    sm_scale_bits: int,
) -> bool:
    """As ``launch_hopper_forward``; keeps a launch that compiled no code and copied no tensor."""
    sizes = Sizes.of(q, k, v, arguments)
    if arguments.config.splits is not None or not takes(q, sizes, arguments):
        return False
    kernels = _kernels()
    assert kernels is not None
    of_k, of_v = padded(sizes.D), padded(sizes.Dv)
    places, consumers = processors(q.device), _CONSUMERS[of_v]
    tiles = sizes.query_tiles(consumers * _WARPGROUP_ROWS)
    heads = tiles.number // tiles.of_head
    m_blocks, narrow, alike = tiles.of_head, 0, _alike(sizes, arguments)
    if not tiles.entries:
        m_blocks, narrow = query_tiles(sizes.M, heads, consumers, places, alike)
    programs = m_blocks * heads
    # Programs are persistent and take one tile after another. Long heads whose tiles take equally
    # long are faster with one program per tile: programs that read the same keys then run together.
    takes_turns = places < programs and (2 * m_blocks <= places or not alike)
    described = {
        "q_desc": _described(q, _WARPGROUP_ROWS, of_k), "k_desc": _described(k, _KEYS, of_k),
        "v_desc": _described(v, _KEYS, of_v),
    }  # fmt: skip
    with on_device(q):
        launched = run(
            kernels[0], (places if takes_turns else programs,), {
                "num_warps": _WARPS, **described, "out_ptr": out, "lse_ptr": lse,
                "counter_ptr": _counter(arguments, takes_turns),
                "heads": heads, "m_blocks": m_blocks, "narrow": narrow,
                "together": programs_together(programs, places, alike), "entries": tiles.entries,
                **_sizes(sizes), "Dv": sizes.Dv, **_masked(arguments),
                "sm_scale_bits": sm_scale_bits, "CONSUMERS": consumers,
                "STAGES": _STAGES[max(of_k, of_v)], **sink_args(arguments),
            }, kinds=(q.dtype, of_k, of_v, arguments.sinks is None),
        )  # fmt: skip
    fields = tuple(dict(vars(x)) for x in described.values())
    copied = [x.pop("base") is not of for x, of in zip(fields, (q, k, v), strict=True)]
    if launched is not None and not any(copied):
        if len(arguments.launches) >= _LAUNCHES:
            arguments.launches.clear()
        code, given = launched
        arguments.launches[key] = _Launch(code, fields, takes_turns, given[_TENSORS:])
    return True


def launch_hopper_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sums: torch.Tensor | None,
    sizes: Sizes,
    arguments: Arguments,
    sm_scale_bits: int,
) -> None:
    """Writes dk and dv of a call that ``takes`` accepts, on the current device.

    lse2 and delta (B,H,M_padded) come from ``bwd_preprocess_kernel``. Unless ``sums`` is None, the
    kernel adds dq without sm_scale to it: float32 (B,H,M_padded,padded(D,Dv)) in the order of
    ``rows_of_blocks``.
    """
    kernels = _kernels()
    assert kernels is not None
    columns = padded(sizes.D, sizes.Dv)
    rows = _BACKWARD_ROWS[columns]
    tiles, alike = sizes.key_tiles(_KEYS), _alike(sizes, arguments)
    programs, partition = _partition(tiles.number, 2 * _KEYS, columns, lse2, arguments, alike)
    run(
        kernels[1], (programs,), {
            "num_warps": _WARPS,
            "q_desc": _described(q, rows, columns),
            "k_desc": _described(k, _WARPGROUP_ROWS, columns),
            "v_desc": _described(v, _WARPGROUP_ROWS, columns),
            "dout_desc": _described(dout, rows, columns),
            "lse2_ptr": lse2, "delta_ptr": delta, "dk_ptr": dk, "dv_ptr": dv,
            "dq_ptr": lse2 if sums is None else sums,
            "tiles_of_head": tiles.of_head, "entries": tiles.entries, **partition,
            **_sizes(sizes), "M_padded": lse2.shape[2], "D": sizes.D, "Dv": sizes.Dv,
            **_masked(arguments), "sm_scale_bits": sm_scale_bits,
            "STAGES": _BACKWARD_STAGES, "ONE_PASS": sums is not None, "ROW_PADDING": ROW_PADDING,
        }, kinds=(q.dtype, dout.dtype, columns),
    )  # fmt: skip


def launch_hopper_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    sizes: Sizes,
    arguments: Arguments,
    sm_scale_bits: int,
) -> None:
    """Writes dq of a call that ``takes`` accepts, on the current device.

    lse2 and delta (B,H,M_padded) come from ``bwd_preprocess_kernel``.
    """
    kernels = _kernels()
    assert kernels is not None
    of_k, of_v = padded(sizes.D), padded(sizes.Dv)
    rows = 2 * _WARPGROUP_ROWS
    tiles, alike = sizes.query_tiles(rows), _alike(sizes, arguments)
    programs, partition = _partition(tiles.number, rows, of_k, lse2, arguments, alike)
    run(
        kernels[2], (programs,), {
            "num_warps": _WARPS,
            "q_desc": _described(q, _WARPGROUP_ROWS, of_k), "k_desc": _described(k, _KEYS, of_k),
            "v_desc": _described(v, _KEYS, of_v),
            "dout_desc": _described(dout, _WARPGROUP_ROWS, of_v),
            "lse2_ptr": lse2, "delta_ptr": delta, "dq_ptr": dq,
            "tiles_of_head": tiles.of_head, "entries": tiles.entries, **partition,
            **_sizes(sizes), "M_padded": lse2.shape[2], "D": sizes.D,
            **_masked(arguments), "sm_scale_bits": sm_scale_bits,
            "STAGES": _DQ_STAGES[max(of_k, of_v)], "ROW_PADDING": ROW_PADDING,
        }, kinds=(q.dtype, dout.dtype, of_k, of_v),
    )  # fmt: skip
