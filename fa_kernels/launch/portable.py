"""Launches the portable kernels, and dispatches to ``hopper`` where it takes a call."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fa_kernels.configs import Tile
from fa_kernels.kernels.common.addressing import PAGED
from fa_kernels.kernels.common.score_mod import ALIBI, BIAS, SOFTCAP
from fa_kernels.kernels.portable.bwd_preprocess import bwd_preprocess_kernel
from fa_kernels.kernels.portable.dbias import dbias_kernel
from fa_kernels.kernels.portable.dkdv import dkdv_kernel
from fa_kernels.kernels.portable.dq import dq_kernel
from fa_kernels.kernels.portable.dq_postprocess import dq_postprocess_kernel
from fa_kernels.kernels.portable.forward import forward_kernel
from fa_kernels.kernels.portable.kvcache import append_kernel, join_kernel, kvcache_kernel
from fa_kernels.kernels.portable.pool import pool_kernel
from fa_kernels.launch import hopper
from fa_kernels.launch.combine import launch_combine_splits
from fa_kernels.launch.sinks import sink_args, write_dsinks
from fa_kernels.launch.sizes import ROW_PADDING, Sizes
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.launch_cache import cdiv, run
from fa_kernels.validation.arguments import Arguments

__all__ = [
    "Cache",
    "backward_kernels",
    "empty_gradients",
    "empty_outputs",
    "empty_pooled",
    "launch_append",
    "launch_backward",
    "launch_forward",
    "launch_pooled",
    "launch_with_kvcache",
    "processors",
]

PREPROCESS_ROWS = 32
APPENDED_ROWS = 16
JOINED_ROWS = 4
# With this many programs for each multiprocessor, splits are computed in turn.
PROGRAMS_IN_TURN = 8
# Numbers of the sums of splits, 512 MiB in float32. Longer caches are computed in turn.
MAX_SCRATCH = 2**27
# Rows of a program of ``dq_postprocess_kernel``, by its IN_BLOCKS.
SUMS_ROWS = {False: 32, True: 64}
# The kernels' names for the strides of each tensor.
_STRIDES = {
    "q": ("stride_qb", "stride_qh", "stride_qm", "stride_qd"),
    "k": ("stride_kb", "stride_kh", "stride_kn", "stride_kd"),
    "v": ("stride_vb", "stride_vh", "stride_vn", "stride_vd"),
    "dout": ("stride_ob", "stride_oh", "stride_om", "stride_od"),
    "dlse": ("stride_lb", "stride_lh", "stride_lm"),
    "new_k": ("stride_xb", "stride_xh", "stride_xn", "stride_xd"),
    "new_v": ("stride_yb", "stride_yh", "stride_yn", "stride_yd"),
}
_SUMS = ("acc_ptr", "m_ptr", "l_ptr")
_OF_LISTS = ("stride_lb", "stride_lh", "stride_lt")
_OF_SLOPES = ("stride_sb", "stride_sh")
_OF_BIAS = ("stride_bb", "stride_bh", "stride_bm", "stride_bn")
# Offsets within a tile of 256 rows fit int32.
MAX_ALIGNED_STRIDE = 2**22


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _acc(dtype: torch.dtype) -> tl.dtype:
    """Returns the accumulator's dtype as a Triton dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@lru_cache(maxsize=512)
def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _alignment(*tensors: torch.Tensor) -> int:
    """Returns ALIGNED of ``load_tile``: 1 if 16-byte loads are possible, else 0.

    Only 16-bit dtypes take these paths. Their dots run on tensor cores, whose layouts do not depend
    on the loads, so all paths give the same bits.
    """
    for x in tensors:
        if x.data_ptr() % 16 or not _has_aligned_rows(x.shape[3], x.stride(), x.element_size()):
            return 0
    return 1


@lru_cache(maxsize=512)
def _has_aligned_rows(head_dim: int, strides: tuple[int, ...], size: int) -> bool:
    return (
        size == 2
        and head_dim % 8 == 0
        and strides[3] == 1
        and not any(stride % 8 for stride in strides[:3])
        and strides[2] <= MAX_ALIGNED_STRIDE
    )


def _constants(dtype: torch.dtype, D: int, Dv: int, arguments: Arguments) -> dict:
    """Returns the constexpr arguments that the matrix kernels share."""
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


def _unfused(dtype: torch.dtype) -> dict:
    """Returns the options of a forward, whose bits do not depend on the place of a row in its tile.

    In float64 the compiler fuses a product and a sum of the exponential in a softcap, for one
    element of a thread and not for the others. In other dtypes the exponential is an instruction.
    """
    return {"enable_fp_fusion": False} if dtype == torch.float64 else {}


def _predicate(arguments: Arguments, kernel: str) -> dict:
    """Returns a kernel's block map, its strides and the predicate's arguments.

    Without a predicate they are placeholders. ``kernel`` is a field of ``BlockMaps``.
    """
    lists, order, strides, args = arguments.seqlens_q, arguments.seqlens_q, (0, 0, 0), (0,)
    if arguments.predicate is not None and arguments.maps is not None:
        lists, order = getattr(arguments.maps, kernel)
        strides, args = lists.stride()[:3], arguments.predicate.args
    return {
        "order_ptr": order, "lists_ptr": lists, **dict(zip(_OF_LISTS, strides, strict=True)),
        "mask_args": args,
    }  # fmt: skip


@lru_cache(maxsize=512)
def _scale_bits(sm_scale: float) -> int:
    """Returns the bits of a float64 as an int64; see ``softmax.scale_from_bits``."""
    return struct.unpack("<q", struct.pack("<d", sm_scale))[0]


def _strides(arguments: Arguments, **tensors: torch.Tensor) -> dict[str, int]:
    """Returns strides of (entry, head, row, column); in a varlen call, an entry is a row."""
    varlen = arguments.longest is not None
    named: dict[str, int] = {}
    for name, x in tensors.items():
        strides = x.stride()
        if varlen:
            strides = (strides[2], *strides[1:])
        named.update(zip(_STRIDES[name], strides, strict=True))
    return named


def _lengths(arguments: Arguments) -> dict:
    return {"seqlens_q_ptr": arguments.seqlens_q, "seqlens_k_ptr": arguments.seqlens_k}


def _window(arguments: Arguments) -> dict[str, int]:
    """Returns the arguments for the window and the softmax scale."""
    return {
        "window_left": arguments.window_left, "window_right": arguments.window_right,
        "sm_scale_bits": _scale_bits(arguments.sm_scale),
    }  # fmt: skip


def _blank(arguments: Arguments, **tensors: torch.Tensor | None) -> None:
    """Fills the outputs of a varlen call with 0, lse and m with -inf.

    The kernels do not write rows that belong to no sequence.
    """
    if arguments.longest is not None:
        for name, x in tensors.items():
            if x is not None:
                x.fill_(-math.inf if name in ("lse", "m") else 0.0)


def _score_mods(arguments: Arguments) -> int:
    """Returns SCORE_MODS: a sum of the constants in ``kernels.common.score_mod``."""
    given = (
        (arguments.softcap, SOFTCAP), (arguments.alibi_slopes, ALIBI), (arguments.bias, BIAS)
    )  # fmt: skip
    return sum(mod.value for x, mod in given if x is not None)


def _score_args(arguments: Arguments) -> dict:
    """Returns the arguments of score modifications, with placeholders for the absent ones."""
    softcap = 0 if arguments.softcap is None else _scale_bits(arguments.softcap)
    slopes, slope_strides = arguments.seqlens_q, (0, 0)
    if arguments.alibi_slopes is not None:
        slopes = arguments.alibi_slopes
        slope_strides = (0, *slopes.stride())[-2:]
    bias, bias_strides = arguments.seqlens_q, (0, 0, 0, 0)
    if arguments.bias is not None:
        bias = arguments.bias
        # A broadcast axis has stride 0.
        bias_strides = tuple(
            0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True)
        )
    return {
        "softcap_bits": softcap,
        "slopes_ptr": slopes, **dict(zip(_OF_SLOPES, slope_strides, strict=True)),
        "bias_ptr": bias, **dict(zip(_OF_BIAS, bias_strides, strict=True)),
        "SCORE_MODS": _score_mods(arguments),
    }  # fmt: skip


def empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates out (B,H,M,Dv) in the dtype of q and lse (B,H,M), contiguous."""
    B, H, M, _ = q.shape
    out = allocation.empty((B, H, M, v.shape[3]), dtype=q.dtype, device=q.device)
    return out, allocation.empty((B, H, M), dtype=_accumulator(q.dtype), device=q.device)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B,H,M,Dv) in the dtype of q and lse (B,H,M), float32 (float64 for float64)."""
    out, lse = empty_outputs(q, v)
    _blank(arguments, out=out, lse=lse)
    bits = _scale_bits(arguments.sm_scale)
    if hopper.launch_hopper_forward(q, k, v, out, lse, arguments, bits):
        return out, lse
    sizes = Sizes.of(q, k, v, arguments)
    tile = arguments.config.forward
    num_splits = arguments.config.splits
    # Without IS_SPLIT l is not written.
    written = (out, lse, lse)
    if num_splits is not None:
        acc, m, l_sum = (
            allocation.empty((num_splits, *x.shape), dtype=lse.dtype, device=q.device)
            for x in written
        )
        _blank(arguments, m=m)
        written = (acc, m, l_sum)
    constants = _constants(q.dtype, sizes.D, sizes.Dv, arguments)
    tiles = sizes.query_tiles(tile.block_m)
    rows = lse.numel()
    if tiles.number:
        with on_device(q):
            run(
                forward_kernel, (tiles.number * (num_splits or 1),),
                {
                    "q_ptr": q, "k_ptr": k, "v_ptr": v,
                    "out_ptr": written[0], "lse_ptr": written[1], "l_ptr": written[2],
                    **_lengths(arguments), **tiles.in_kernels(),
                    **_strides(arguments, q=q, k=k, v=v), **sizes.in_kernels(),
                    **_window(arguments), "num_splits": num_splits or 1, "rows": rows,
                    **_predicate(arguments, "forward"), **_score_args(arguments),
                    **sink_args(arguments),
                    "ALIGNED": _alignment(q, k, v, out), "IS_SPLIT": num_splits is not None,
                    "VARLEN": arguments.longest is not None, **constants, **_tile(tile),
                    **_unfused(q.dtype),
                },
            )  # fmt: skip
            if num_splits is not None:
                launch_combine_splits(*written, out, lse)
    return out, lse


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needed: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """Allocates dq, dk, dv, contiguous; None if no kernel writes one. dk and dv go together."""
    of_keys = needed[1] or needed[2]
    return tuple(
        allocation.empty(x.shape, dtype=x.dtype, device=x.device) if is_made else None
        for x, is_made in ((q, needed[0]), (k, of_keys), (v, of_keys))
    )


def backward_kernels(needed: tuple[bool, bool, bool], one_pass: bool) -> tuple[str, ...]:
    """Returns which of the kernels "dkdv" and "dq" compute the needed ones of (dq, dk, dv)."""
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
    dsinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns dq, dk, dv, contiguous, in the dtypes of q, k, v.

    Gradients that are not needed are None. One kernel computes dk and dv; in one pass it also adds
    to dq by atomics, in no fixed order. All other results are bitwise repeatable. ``dbias``, if
    given, is contiguous with the shape and dtype of the bias, and receives its gradient.
    ``dsinks``, float32 (H,), likewise receives the gradient of the sinks.
    """
    sizes = Sizes.of(q, k, v, arguments)
    varlen = arguments.longest is not None
    kernels = backward_kernels(needed, arguments.one_pass)
    one_pass = needed[0] and "dq" not in kernels
    on_hopper = hopper.takes(q, sizes, arguments)
    # Scratch is padded to whole tiles of rows and columns, so that kernels need no mask for it.
    tiles_of_rows = cdiv(sizes.total_q, ROW_PADDING) + (sizes.B if varlen else 0)
    shape = (q.shape[0], sizes.H, tiles_of_rows * ROW_PADDING)
    lse2, delta = (allocation.empty(shape, dtype=lse.dtype, device=q.device) for _ in range(2))
    columns, sums = 0, delta
    if one_pass:
        columns = hopper.padded(sizes.D, sizes.Dv) if on_hopper else _padded(sizes.D)
        sums = allocation.empty((*shape, columns), dtype=delta.dtype, device=q.device)
    dq, dk, dv = empty_gradients(q, k, v, needed)
    _blank(arguments, dq=dq, dk=dk, dv=dv)
    if dsinks is not None and varlen:
        # No kernel writes the scratch between sequences.
        lse2.fill_(math.inf)
        delta.zero_()
    # A placeholder without dlse.
    dlses = lse if dlse is None else dlse
    bits = _scale_bits(arguments.sm_scale)
    acc = _acc(q.dtype)
    places = {"ROW_PADDING": ROW_PADDING, "VARLEN": varlen}
    of_rows = {
        "seqlens_q_ptr": arguments.seqlens_q, "H": sizes.H, "M": sizes.M,
        "M_padded": delta.shape[2], "total_q": sizes.total_q,
    }  # fmt: skip
    with on_device(q):
        tiles = sizes.query_tiles(ROW_PADDING)
        if tiles.number:
            # Without enable_fp_fusion=False the compiler fuses a product and a sum where the layout
            # puts both into one thread. The layout depends on ALIGNED, so delta would have other
            # bits for other strides of dout.
            run(
                bwd_preprocess_kernel, (tiles.number * (ROW_PADDING // PREPROCESS_ROWS),),
                {
                    "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse, "dlse_ptr": dlses,
                    "lse2_ptr": lse2, "delta_ptr": delta, "sums_ptr": sums, **tiles.in_kernels(),
                    **_strides(arguments, dout=dout, dlse=dlses), **of_rows, "Dv": sizes.Dv,
                    "has_dlse": int(dlse is not None), "columns": columns,
                    "BLOCK_M": PREPROCESS_ROWS, "BLOCK_DV": _padded(sizes.Dv), "ACC": acc,
                    "ALIGNED": _alignment(out, dout), "enable_fp_fusion": False, **places,
                }, kinds=(out.dtype, dout.dtype, lse.dtype, dlses.dtype),
            )  # fmt: skip
        if dsinks is not None and arguments.sinks is not None:
            write_dsinks(dsinks, arguments.sinks, lse2, delta)
        if on_hopper:
            inputs = (q, k, v, dout, lse2, delta)
            if "dkdv" in kernels:
                target = sums if one_pass else None
                hopper.launch_hopper_backward(*inputs, dk, dv, target, sizes, arguments, bits)
            if "dq" in kernels:
                hopper.launch_hopper_dq(*inputs, dq, sizes, arguments, bits)
            kernels = ()
        if kernels or dbias is not None:
            inputs = _BackwardInputs(q, k, v, dout, lse2, delta)
            gradients = _Gradients(dq, dk, dv, dbias)
            _launch_portable(inputs, gradients, sums, sizes, arguments, kernels, one_pass)
        rows = SUMS_ROWS[on_hopper]
        tiles = sizes.query_tiles(rows)
        if one_pass and tiles.number:
            run(
                dq_postprocess_kernel, (tiles.number,),
                {
                    "sums_ptr": sums, "dq_ptr": dq, **tiles.in_kernels(), **of_rows, "D": sizes.D,
                    "sm_scale_bits": bits, "BLOCK_M": rows, "BLOCK_D": columns, "ACC": acc,
                    "ALIGNED": _alignment(dq), "IN_BLOCKS": on_hopper, **places,
                }, kinds=(dq.dtype,),
            )  # fmt: skip
    return dq, dk if needed[1] else None, dv if needed[2] else None


class _BackwardInputs(NamedTuple):
    """The tensors that the backward kernels read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse2: torch.Tensor
    delta: torch.Tensor


class _Gradients(NamedTuple):
    """The tensors that the backward kernels write; None for those that no kernel writes."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dbias: torch.Tensor | None


def _launch_portable(
    inputs: _BackwardInputs,
    gradients: _Gradients,
    sums: torch.Tensor,
    sizes: Sizes,
    arguments: Arguments,
    kernels: tuple[str, ...],
    one_pass: bool,
) -> None:
    """Launches ``kernels``, and ``dbias_kernel`` if dbias is given.

    In one pass, ``dkdv_kernel`` adds dq to ``sums``.
    """
    q, k, v, dout, lse2, delta = inputs
    dq, dk, dv, dbias = gradients
    constants = _constants(q.dtype, sizes.D, sizes.Dv, arguments)
    shared = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "lse2_ptr": lse2, "delta_ptr": delta,
        "M_padded": delta.shape[2], **_lengths(arguments),
        **_strides(arguments, q=q, k=k, v=v, dout=dout), **sizes.in_kernels(),
        **_window(arguments), **_score_args(arguments),
    }  # fmt: skip
    places = {"ROW_PADDING": ROW_PADDING, "VARLEN": arguments.longest is not None}
    tile = arguments.config.dkdv
    tiles = sizes.key_tiles(tile.block_n)
    if tiles.number and "dkdv" in kernels:
        run(
            dkdv_kernel, (tiles.number,),
            {
                **shared, "dk_ptr": dk, "dv_ptr": dv, "dq_ptr": sums, **tiles.in_kernels(),
                **_predicate(arguments, "dkdv"),
                "ALIGNED": _alignment(q, k, v, dout, dk, dv), "ONE_PASS": one_pass,
                **places, **constants, **_tile(tile),
            },
        )  # fmt: skip
    tile = arguments.config.dq
    tiles = sizes.query_tiles(tile.block_m)
    if tiles.number and "dq" in kernels:
        run(
            dq_kernel, (tiles.number,),
            {
                **shared, "dq_ptr": dq, **tiles.in_kernels(), **_predicate(arguments, "dq"),
                "ALIGNED": _alignment(q, k, v, dout, dq), **places, **constants, **_tile(tile),
            },
        )  # fmt: skip
    if dbias is not None and dbias.numel():
        # The kernel visits padded sequences head by head; it has no order and no total rows.
        asked = shared | _predicate(arguments, "dq")
        for name in ("order_ptr", "total_q", "total_k"):
            del asked[name]
        shared_axes = [size == 1 for size in dbias.shape]
        over = dict(zip(("OVER_B", "OVER_H", "OVER_M", "OVER_N"), shared_axes, strict=True))
        blocks = (1, 1, tile.block_m, tile.block_n)
        run(
            dbias_kernel, (math.prod(map(cdiv, dbias.shape, blocks)),),
            {
                **asked, "dbias_ptr": dbias, "B": sizes.B, "ALIGNED": _alignment(q, k, v, dout),
                **over, **constants, **_tile(tile),
            },
        )  # fmt: skip


def empty_pooled(q: torch.Tensor, k: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Allocates pooled (B,H,ceil(M/rows),ceil(N/keys)), contiguous."""
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
    # A block larger than the sequence covers it; clamping keeps sizes within int32.
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
            {
                "q_ptr": q, "k_ptr": k, "lse_ptr": lse, "pooled_ptr": pooled, **_lengths(arguments),
                **_strides(arguments, q=q, k=k), "H": H, "G": H // k.shape[1], "M": M, "N": N,
                "D": D, "pool_rows": rows, "pool_keys": keys, **_window(arguments),
                "mask_args": (0,) if predicate is None else predicate.args,
                "ALIGNED": _alignment(q, k), "MAX": pool == "max", **constants, **_tile(tile),
            },
        )  # fmt: skip
    return pooled


class Cache(NamedTuple):
    """Caches of keys (pages, page_size, Hk, D) and of values, and the pages of each batch entry.

    Args:
        k: The keys, any strides.
        v: The values, any strides.
        table: (B, places), int32, any strides.
        capacity: The keys for which an entry has places, 0 without pages.
        is_paged: Whether an entry has more than one place in the table, or pages of its own size.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    capacity: int
    is_paged: bool

    @property
    def is_shared(self) -> bool:
        """Whether the values are the first columns of the keys, in the same memory."""
        k, v = self.k, self.v
        return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()

    def in_kernels(self) -> dict:
        """Returns the arguments that the kernels share."""
        # The kernels' order of strides: page, head, row, column.
        k, v = (x.transpose(1, 2) for x in (self.k, self.v))
        return {
            "k_ptr": self.k, "v_ptr": self.v, "table_ptr": self.table,
            **dict(zip(_STRIDES["k"], k.stride(), strict=True)),
            **dict(zip(_STRIDES["v"], v.stride(), strict=True)),
            **dict(zip(("stride_tb", "stride_tp"), self.table.stride(), strict=True)),
            "page_size": self.k.shape[1], "num_pages": self.k.shape[0], "N": self.capacity,
            "D": self.k.shape[3], "Dv": self.v.shape[3],
            "BLOCK_D": _padded(self.k.shape[3]), "BLOCK_DV": _padded(self.v.shape[3]),
        }  # fmt: skip


def launch_append(cache: Cache, k: torch.Tensor, v: torch.Tensor, seqlens_k: torch.Tensor) -> None:
    """Writes k (B,Hk,L,D) and v (B,Hk,L,Dv) behind the seqlens_k (B,) keys of each entry."""
    B, Hk, L, _ = k.shape
    tiles = cdiv(L, APPENDED_ROWS)
    if B * tiles and cache.capacity:
        strides = (
            *zip(_STRIDES["new_k"], k.stride(), strict=True),
            *zip(_STRIDES["new_v"], v.stride(), strict=True),
        )
        with on_device(k):
            run(
                append_kernel, (B * Hk * tiles,),
                {
                    **cache.in_kernels(), "new_k_ptr": k, "new_v_ptr": v, **dict(strides),
                    "seqlens_k_ptr": seqlens_k, "tiles_of_head": tiles, "Hk": Hk, "L": L,
                    "BLOCK_N": APPENDED_ROWS,
                },
            )  # fmt: skip


def launch_with_kvcache(
    q: torch.Tensor,
    cache: Cache,
    seqlens_k: torch.Tensor,
    arguments: Arguments,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (B,H,M,Dv) and lse (B,H,M) of queries and the keys that a cache holds.

    An entry has seqlens_k (B,) keys; the lengths of ``arguments`` are not used. The keys are
    divided into splits of ``config.split_keys`` keys, or into ``num_splits``.
    """
    B, H, M, D = q.shape
    Dv = cache.v.shape[3]
    predicate = arguments.predicate
    # A predicate takes one head.
    Hk = cache.v.shape[2] if predicate is None else H
    out, lse = empty_outputs(q, cache.v)
    tile = arguments.config.cache
    tiles = cdiv(M * (H // Hk), tile.block_m)
    if not B * tiles:
        return out, lse
    split_keys = arguments.config.split_keys
    if num_splits is not None:
        split_keys = max(1, cdiv(cdiv(cache.capacity, num_splits), tile.block_n)) * tile.block_n
    splits = cdiv(cache.capacity, split_keys)
    programs = B * Hk * tiles
    scratch = splits * B * H * M * (Dv + 2)
    busy = PROGRAMS_IN_TURN * processors(q.device)
    apart = splits > 1 and programs < busy and scratch <= MAX_SCRATCH
    # In turn, the sums are not written. Their dtype is the same, and so is the compiled code.
    sums = (lse, lse, lse)
    if apart:
        sums = tuple(
            allocation.empty((splits, *x.shape), dtype=lse.dtype, device=q.device)
            for x in (out, lse, lse)
        )
    is_wide = _alignment(q, cache.k.transpose(1, 2), cache.v.transpose(1, 2))
    constants = _constants(q.dtype, D, Dv, arguments)
    constants["BLOCK_D"], constants["BLOCK_REST"] = _parts(D)
    sizes = {"M": M, "N": cache.capacity, "Dv": Dv, "rows": B * H * M}
    window = _window(arguments)
    sinks = _cache_sinks(arguments, lse)
    with on_device(q):
        run(
            kvcache_kernel, (programs * (splits if apart else 1),),
            {
                **cache.in_kernels(), **constants, **sizes, "q_ptr": q, "out_ptr": out,
                "lse_ptr": lse, **dict(zip(_SUMS, sums, strict=True)),
                **dict(zip(_STRIDES["q"], q.stride(), strict=True)),
                "seqlens_k_ptr": seqlens_k, "tiles_of_head": tiles, "B": B, "Hk": Hk,
                "G": H // Hk, "groups": Hk // cache.v.shape[2], **window,
                "mask_args": (0,) if predicate is None else predicate.args,
                "split_tiles": split_keys // tile.block_n, "apart": int(apart),
                **_score_args(arguments), **sinks,
                "ALIGNED": (PAGED.value if cache.is_paged else 0) + is_wide,
                "SHARED": cache.is_shared and Dv == constants["BLOCK_D"], **_tile(tile),
                # Loads by way of the table take every second stage.
                "num_stages": (2 * tile.num_stages - 1) if cache.is_paged else tile.num_stages,
                **_unfused(q.dtype),
            },
        )  # fmt: skip
        if apart:
            del window["sm_scale_bits"]
            run(
                join_kernel, (cdiv(B * H * M, JOINED_ROWS),),
                {
                    **dict(zip(_SUMS, sums, strict=True)), "out_ptr": out, "lse_ptr": lse,
                    "seqlens_k_ptr": seqlens_k, **sizes, "H": H, **window,
                    "split_keys": split_keys, **sinks, "BLOCK_R": JOINED_ROWS,
                    "BLOCK_DV": constants["BLOCK_DV"], "ACC": constants["ACC"],
                    **_unfused(q.dtype),
                },
            )  # fmt: skip
    return out, lse


def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 1 for the interpreter."""
    return hopper.processors(device) if device.type == "cuda" else 1


def _parts(head_dim: int) -> tuple[int, int]:
    """Returns BLOCK_D and BLOCK_REST of the keys: 192 and 576 columns are no power of two."""
    for block, rest in ((128, 64), (512, 64)):
        if block < head_dim <= block + rest:
            return block, rest
    return _padded(head_dim), 0


def _cache_sinks(arguments: Arguments, lse: torch.Tensor) -> dict:
    """Returns the arguments of sinks; without any, lse stands for them."""
    sinks = arguments.sinks
    if sinks is None:
        return {"sinks_ptr": lse, "stride_sink": 0, "sink_heads": 0}
    return {"sinks_ptr": sinks, "stride_sink": sinks.stride(0), "sink_heads": len(sinks)}
