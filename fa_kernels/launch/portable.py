"""Allocates outputs and scratch, and launches the kernels."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fa_kernels.configs import Tile
from fa_kernels.kernels.common.score_mod import ALIBI, BIAS, SOFTCAP
from fa_kernels.kernels.portable.bwd_preprocess import delta_kernel
from fa_kernels.kernels.portable.combine import merge_kernel
from fa_kernels.kernels.portable.dbias import dbias_kernel
from fa_kernels.kernels.portable.dkdv import dkdv_kernel
from fa_kernels.kernels.portable.dq import dq_kernel
from fa_kernels.kernels.portable.dq_postprocess import dq_of_sums_kernel
from fa_kernels.kernels.portable.forward import forward_kernel
from fa_kernels.kernels.portable.pool import pool_kernel
from fa_kernels.launch import hopper
from fa_kernels.launch.sizes import ROW_PADDING, Sizes
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.launch_cache import cdiv, run
from fa_kernels.validation.arguments import Arguments

__all__ = [
    "backward_kernels",
    "empty_gradients",
    "empty_outputs",
    "empty_pooled",
    "launch_backward",
    "launch_forward",
    "launch_pooled",
]

DELTA_ROWS = 32
# By whether they lie in blocks.
SUMS_ROWS = {False: 32, True: 64}
MERGE_ROWS = 4
# 256 rows of a tile stay within int32 offsets.
MAX_ALIGNED_STRIDE = 2**22


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _acc(dtype: torch.dtype) -> tl.dtype:
    """The same, as kernels take it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@lru_cache(maxsize=512)
def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _alignment(*tensors: torch.Tensor) -> int:
    """ALIGNED of ``load_tile``: 1 where 16 bytes can be loaded at a time, 2 without a mask too.

    Only 16-bit dtypes take these paths: their dots run on tensor cores, whose layouts do not follow
    the loads, so that all paths give the same bits.
    """
    least = 2
    for x in tensors:
        if x.data_ptr() % 16:
            return 0
        least = min(least, _alignment_of_rows(x.shape[3], x.stride(), x.element_size()))
    return least


@lru_cache(maxsize=512)
def _alignment_of_rows(head_dim: int, strides: tuple[int, ...], size: int) -> int:
    if (
        size != 2
        or head_dim % 8
        or strides[3] != 1
        or any(stride % 8 for stride in strides[:3])
        or strides[2] > MAX_ALIGNED_STRIDE
    ):
        return 0
    return 2 if head_dim == _padded(head_dim) else 1


def _constants(dtype: torch.dtype, D: int, Dv: int, arguments: Arguments) -> dict:
    """Constexpr arguments that the matrix kernels share."""
    return {
        "BLOCK_D": _padded(D),
        "BLOCK_DV": _padded(Dv),
        "ACC": _acc(dtype),
        "DOTS": arguments.config.dots if dtype == torch.float32 else "ieee",
        "PREDICATE": None if arguments.predicate is None else arguments.predicate.function,
    }


def _tile(tile: Tile) -> dict:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _predicate(arguments: Arguments, kernel: str) -> tuple:
    """The block map of a kernel with its strides, and the predicate's arguments; fillers if none.

    ``kernel`` is a field of ``BlockMaps``.
    """
    if arguments.predicate is None or arguments.maps is None:
        return arguments.seqlens_q, arguments.seqlens_q, 0, 0, 0, (0,)
    lists, order = getattr(arguments.maps, kernel)
    return order, lists, *lists.stride()[:3], arguments.predicate.args


@lru_cache(maxsize=512)
def _scale_bits(sm_scale: float) -> int:
    """The float64's bits as an int64; see ``tiles.scale_from_bits``."""
    return struct.unpack("<q", struct.pack("<d", sm_scale))[0]


def _strides(arguments: Arguments, *tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides of (entry, head, row, column); the entry of packed sequences is a row."""
    packed = arguments.longest is not None
    return tuple(
        stride for x in tensors for stride in (x.stride(2 if packed else 0), *x.stride()[1:])
    )


def _blank(arguments: Arguments, **tensors: torch.Tensor | None) -> None:
    """Fills what is packed, since rows of no sequence are not written: lse and m -inf, else 0."""
    if arguments.longest is not None:
        for name, x in tensors.items():
            if x is not None:
                x.fill_(-math.inf if name in ("lse", "m") else 0.0)


def _mods(arguments: Arguments) -> int:
    """What is done to scores, as a sum of the constants in ``kernels.scores``."""
    done = (
        (arguments.softcap, SOFTCAP), (arguments.alibi_slopes, ALIBI), (arguments.bias, BIAS)
    )  # fmt: skip
    return sum(mod.value for given, mod in done if given is not None)


def _score_args(arguments: Arguments) -> tuple:
    """What the kernels do to scores, as ``kernels.scores`` reads it; a filler if nothing."""
    softcap = 0 if arguments.softcap is None else _scale_bits(arguments.softcap)
    slopes, strides = arguments.seqlens_q, (0, 0)
    if arguments.alibi_slopes is not None:
        slopes = arguments.alibi_slopes
        strides = (0, *slopes.stride())[-2:]
    bias = arguments.seqlens_q if arguments.bias is None else arguments.bias
    # What is shared has one element, whose place is the same for all.
    apart = (0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True))
    return softcap, slopes, *strides, bias, *(apart if bias.ndim == 4 else (0, 0, 0, 0))


def empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten out (B,H,M,Dv) in the dtype of q and lse (B,H,M), contiguous."""
    B, H, M, _ = q.shape
    out = allocation.empty((B, H, M, v.shape[3]), dtype=q.dtype, device=q.device)
    return out, allocation.empty((B, H, M), dtype=_accumulator(q.dtype), device=q.device)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B,H,M,Dv) in the dtype of q and lse (B,H,M), float32 (float64 for float64)."""
    out, lse = empty_outputs(q, v)
    sizes = Sizes.of(q, k, v, arguments)
    if hopper.takes_forward(q, sizes, arguments):
        _blank(arguments, out=out, lse=lse)
        with on_device(q):
            bits = _scale_bits(arguments.sm_scale)
            hopper.launch_hopper_forward(q, k, v, out, lse, sizes, arguments, bits)
        return out, lse
    tile = arguments.config.forward
    parts = arguments.config.splits
    # Without SPLIT l is not written.
    written = (out, lse, lse)
    _blank(arguments, out=out, lse=lse)
    if parts is not None:
        acc, m, l_sum = (
            allocation.empty((parts, *x.shape), dtype=lse.dtype, device=q.device) for x in written
        )
        _blank(arguments, m=m)
        written = (acc, m, l_sum)
    constants = _constants(q.dtype, sizes.D, sizes.Dv, arguments)
    mods = _score_args(arguments)
    tiles = sizes.query_tiles(tile.block_m)
    rows = lse.numel()
    if tiles.number:
        with on_device(q):
            run(
                forward_kernel, (tiles.number * (parts or 1),),
                q, k, v, *written, arguments.seqlens_q, arguments.seqlens_k, *tiles[:2],
                *_strides(arguments, q, k, v), *sizes.in_kernels(),
                arguments.window_left, arguments.window_right, parts or 1, rows,
                _scale_bits(arguments.sm_scale), *_predicate(arguments, "forward"), *mods,
                ALIGNED=_alignment(q, k, v, out), SPLIT=parts is not None,
                PACKED=arguments.longest is not None, MODS=_mods(arguments),
                **constants, **_tile(tile),
            )  # fmt: skip
            if parts is not None:
                run(
                    merge_kernel, (cdiv(rows, MERGE_ROWS),),
                    *written, out, lse, parts, rows, sizes.Dv,
                    BLOCK_R=MERGE_ROWS, BLOCK_DV=constants["BLOCK_DV"], ACC=constants["ACC"],
                )  # fmt: skip
    return out, lse


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needed: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """Unwritten dq, dk, dv, contiguous; None for what no kernel writes. dk and dv go together."""
    of_keys = needed[1] or needed[2]
    return tuple(
        allocation.empty(x.shape, dtype=x.dtype, device=x.device) if is_made else None
        for x, is_made in ((q, needed[0]), (k, of_keys), (v, of_keys))
    )


def backward_kernels(needed: tuple[bool, bool, bool], one_pass: bool) -> tuple[str, ...]:
    """Those of "dkdv" and "dq" that make the needed of dq, dk, dv."""
    of_keys = needed[1] or needed[2]
    of_rows = needed[0] and not (one_pass and of_keys)
    return ("dkdv",) * of_keys + ("dq",) * of_rows


def launch_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    arguments: Arguments,
    *,
    dlse: torch.Tensor | None = None,
    needed: tuple[bool, bool, bool] = (True, True, True),
    dbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns dq, dk, dv, contiguous, in the dtypes of q, k, v.

    Those that are not needed are None; dk and dv come from one kernel. So does dq in one pass, its
    parts added by atomics, in another order every time; else everything is repeatable. ``dbias``,
    contiguous in the shape and dtype of the bias, gets that one's gradient, if it is given.
    """
    sizes = Sizes.of(q, k, v, arguments)
    packed = arguments.longest is not None
    kernels = backward_kernels(needed, arguments.one_pass)
    one_pass = needed[0] and "dq" not in kernels
    on_hopper = hopper.takes(q, sizes, arguments)
    # Whole tiles of rows, so that the kernels read them without a mask; of columns too.
    tiles_of_rows = cdiv(sizes.rows_q, ROW_PADDING) + (sizes.B if packed else 0)
    shape = (q.shape[0], sizes.H, tiles_of_rows * ROW_PADDING)
    lse2, delta = (allocation.empty(shape, dtype=lse.dtype, device=q.device) for _ in range(2))
    columns, sums = 0, delta
    if one_pass:
        columns = hopper.padded(sizes.D, sizes.Dv) if on_hopper else _padded(sizes.D)
        sums = allocation.empty((*shape, columns), dtype=delta.dtype, device=q.device)
    dq, dk, dv = empty_gradients(q, k, v, needed)
    _blank(arguments, dq=dq, dk=dk, dv=dv)
    # Without HAS_DLSE it is not read.
    dlses = lse if dlse is None else dlse
    bits = _scale_bits(arguments.sm_scale)
    acc = _acc(q.dtype)
    places = {"ROW_PADDING": ROW_PADDING, "PACKED": packed}
    inputs = (q, k, v, dout, lse2, delta)
    with on_device(q):
        tiles = sizes.query_tiles(ROW_PADDING)
        if tiles.number:
            # Products that are added unrounded where the layout puts them into one thread would
            # make delta, and dk, another one where sums of dq are cleared beside it.
            run(
                delta_kernel, (tiles.number * (ROW_PADDING // DELTA_ROWS),),
                out, dout, lse, dlses, lse2, delta, sums, arguments.seqlens_q, *tiles[:2],
                *_strides(arguments, dout), *_strides(arguments, dlses),
                sizes.H, sizes.M, delta.shape[2], sizes.rows_q, sizes.Dv,
                BLOCK_M=DELTA_ROWS, BLOCK_DV=_padded(sizes.Dv), ACC=acc,
                ALIGNED=_alignment(out, dout), HAS_DLSE=dlse is not None, COLUMNS=columns,
                kinds=(out.dtype, dout.dtype, lse.dtype, dlses.dtype), enable_fp_fusion=False,
                **places,
            )  # fmt: skip
        if on_hopper:
            if "dkdv" in kernels:
                target = sums if one_pass else None
                hopper.launch_hopper_backward(*inputs, dk, dv, target, sizes, arguments, bits)
            if "dq" in kernels:
                hopper.launch_hopper_dq(*inputs, dq, sizes, arguments, bits)
            kernels = ()
        if kernels or dbias is not None:
            _launch_portable(inputs, (dq, dk, dv, dbias), sums, sizes, arguments, kernels, one_pass)
        rows = SUMS_ROWS[on_hopper]
        tiles = sizes.query_tiles(rows)
        if one_pass and tiles.number:
            # Sums may be as wide as dv on Hopper: then only a mask keeps them to the rows of dq.
            aligned = min(_alignment(dq), 1 + (columns == sizes.D))
            run(
                dq_of_sums_kernel, (tiles.number,),
                sums, dq, arguments.seqlens_q, *tiles[:2],
                sizes.H, sizes.M, delta.shape[2], sizes.rows_q, sizes.D, bits,
                BLOCK_M=rows, BLOCK_D=columns, ACC=acc, ALIGNED=aligned, IN_BLOCKS=on_hopper,
                kinds=(dq.dtype,), **places,
            )  # fmt: skip
    return dq, dk if needed[1] else None, dv if needed[2] else None


def _launch_portable(
    inputs: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor | None, ...],
    sums: torch.Tensor,
    sizes: Sizes,
    arguments: Arguments,
    kernels: tuple[str, ...],
    one_pass: bool,
) -> None:
    """Launches those of ``kernels``, and dbias if it is among dq, dk, dv, dbias.

    ``inputs`` are q, k, v, dout, lse2 and delta; ``sums`` get dq in one pass.
    """
    q, k, v, dout, _, delta = inputs
    dq, dk, dv, dbias = gradients
    constants = _constants(q.dtype, sizes.D, sizes.Dv, arguments)
    places = {"ROW_PADDING": ROW_PADDING, "PACKED": arguments.longest is not None}
    strides = _strides(arguments, q, k, v, dout)
    scalars = (arguments.window_left, arguments.window_right, _scale_bits(arguments.sm_scale))
    shared = (*strides, *sizes.in_kernels(delta.shape[2]), *scalars)
    lengths, mods = (arguments.seqlens_q, arguments.seqlens_k), _score_args(arguments)
    tile = arguments.config.dkdv
    tiles = sizes.key_tiles(tile.block_n)
    if tiles.number and "dkdv" in kernels:
        run(
            dkdv_kernel, (tiles.number,),
            *inputs, dk, dv, sums, *lengths, *tiles[:2], *shared,
            *_predicate(arguments, "dkdv"), *mods,
            ALIGNED=_alignment(q, k, v, dout, dk, dv), ONE_PASS=one_pass,
            MODS=_mods(arguments), **places, **constants, **_tile(tile),
        )  # fmt: skip
    tile = arguments.config.dq
    tiles = sizes.query_tiles(tile.block_m)
    if tiles.number and "dq" in kernels:
        run(
            dq_kernel, (tiles.number,),
            *inputs, dq, *lengths, *tiles[:2], *shared, *_predicate(arguments, "dq"), *mods,
            ALIGNED=_alignment(q, k, v, dout, dq),
            MODS=_mods(arguments), **places, **constants, **_tile(tile),
        )  # fmt: skip
    if dbias is not None and dbias.numel():
        shared_axes = [size == 1 for size in dbias.shape]
        over = dict(zip(("OVER_B", "OVER_H", "OVER_M", "OVER_N"), shared_axes, strict=True))
        tiles = (1, 1, tile.block_m, tile.block_n)
        run(
            dbias_kernel, (math.prod(map(cdiv, dbias.shape, tiles)),),
            *inputs, dbias, *lengths, *strides,
            sizes.H, sizes.H // sizes.Hk, sizes.M, delta.shape[2], sizes.N, sizes.D, sizes.Dv,
            *scalars, *_predicate(arguments, "dq")[1:], *mods, sizes.B,
            ALIGNED=_alignment(q, k, v, dout), MODS=_mods(arguments),
            **over, **constants, **_tile(tile),
        )  # fmt: skip


def empty_pooled(q: torch.Tensor, k: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Unwritten pooled (B,H,ceil(M/rows),ceil(N/keys)), contiguous."""
    B, H, M, _ = q.shape
    shape = (B, H, cdiv(M, rows), cdiv(k.shape[2], keys))
    return allocation.empty(shape, dtype=_accumulator(q.dtype), device=q.device)


def launch_pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    arguments: Arguments,
    pool: str,
    rows: int,
    keys: int,
) -> torch.Tensor:
    """Returns pooled (B,H,ceil(M/rows),ceil(N/keys)), float32 (float64 for float64)."""
    B, H, M, D = q.shape
    N = k.shape[2]
    pooled = empty_pooled(q, k, rows, keys)
    if not pooled.numel():
        return pooled
    # A block that is larger than the sequence is the sequence: so sizes stay within int32.
    rows, keys = min(rows, M), min(keys, N)
    tile = arguments.config.dq
    spans = [
        cdiv(length, max(block // size, 1) * size)
        for length, block, size in ((M, tile.block_m, rows), (N, tile.block_n, keys))
    ]
    constants = _constants(q.dtype, D, D, arguments)
    del constants["BLOCK_DV"]
    predicate = arguments.predicate
    with on_device(q):
        run(
            pool_kernel, (spans[0] * spans[1] * B * H,),
            q, k, lse, pooled, arguments.seqlens_q, arguments.seqlens_k,
            *q.stride(), *k.stride(), H, H // k.shape[1], M, N, D, rows, keys,
            arguments.window_left, arguments.window_right, _scale_bits(arguments.sm_scale),
            (0,) if predicate is None else predicate.args,
            ALIGNED=_alignment(q, k), MAX=pool == "max", **constants, **_tile(tile),
        )  # fmt: skip
    return pooled
