"""Launches the portable kernels, and dispatches to ``hopper`` where it takes a call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl

from fa_kernels.kernels.common.addressing import PAGED
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
from fa_kernels.launch.named_arguments import (
    STRIDES,
    alignment,
    blank,
    length_args,
    padded,
    predicate_args,
    scale_bits,
    score_args,
    stride_args,
    tile_args,
    window_args,
)
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
_SUMS = ("acc_ptr", "m_ptr", "l_ptr")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _acc(dtype: torch.dtype) -> tl.dtype:
    """Returns the accumulator's dtype as a Triton dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def _constants(dtype: torch.dtype, D: int, Dv: int, arguments: Arguments) -> dict:
    """Returns the constexpr arguments that the matrix kernels share."""
    return {
        "BLOCK_D": padded(D),
        "BLOCK_DV": padded(Dv),
        "ACC": _acc(dtype),
        "DOTS": arguments.config.dots if dtype == torch.float32 else "ieee",
        "PREDICATE": None if arguments.predicate is None else arguments.predicate.function,
    }


def _unfused(dtype: torch.dtype) -> dict:
    """Returns the options of a forward, whose bits do not depend on the place of a row in its tile.

    In float64 the compiler fuses a product and a sum of the exponential in a softcap, for one
    element of a thread and not for the others. In other dtypes the exponential is an instruction.
    """
    return {"enable_fp_fusion": False} if dtype == torch.float64 else {}


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
    blank(arguments, out=out, lse=lse)
    bits = scale_bits(arguments.sm_scale)
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
        blank(arguments, m=m)
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
                    **length_args(arguments), **tiles.in_kernels(),
                    **stride_args(arguments, q=q, k=k, v=v), **sizes.in_kernels(),
                    **window_args(arguments), "num_splits": num_splits or 1, "rows": rows,
                    **predicate_args(arguments, "forward"), **score_args(arguments),
                    **sink_args(arguments),
                    "ALIGNED": alignment(q, k, v, out), "IS_SPLIT": num_splits is not None,
                    "VARLEN": arguments.longest is not None, **constants, **tile_args(tile),
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
        columns = hopper.padded(sizes.D, sizes.Dv) if on_hopper else padded(sizes.D)
        sums = allocation.empty((*shape, columns), dtype=delta.dtype, device=q.device)
    dq, dk, dv = empty_gradients(q, k, v, needed)
    blank(arguments, dq=dq, dk=dk, dv=dv)
    if dsinks is not None and varlen:
        # No kernel writes the scratch between sequences.
        lse2.fill_(math.inf)
        delta.zero_()
    # A placeholder without dlse.
    dlses = lse if dlse is None else dlse
    bits = scale_bits(arguments.sm_scale)
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
                    **stride_args(arguments, dout=dout, dlse=dlses), **of_rows, "Dv": sizes.Dv,
                    "has_dlse": int(dlse is not None), "columns": columns,
                    "BLOCK_M": PREPROCESS_ROWS, "BLOCK_DV": padded(sizes.Dv), "ACC": acc,
                    "ALIGNED": alignment(out, dout), "enable_fp_fusion": False, **places,
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
                    "ALIGNED": alignment(dq), "IN_BLOCKS": on_hopper, **places,
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
        "M_padded": delta.shape[2], **length_args(arguments),
        **stride_args(arguments, q=q, k=k, v=v, dout=dout), **sizes.in_kernels(),
        **window_args(arguments), **score_args(arguments),
    }  # fmt: skip
    places = {"ROW_PADDING": ROW_PADDING, "VARLEN": arguments.longest is not None}
    tile = arguments.config.dkdv
    tiles = sizes.key_tiles(tile.block_n)
    if tiles.number and "dkdv" in kernels:
        run(
            dkdv_kernel, (tiles.number,),
            {
                **shared, "dk_ptr": dk, "dv_ptr": dv, "dq_ptr": sums, **tiles.in_kernels(),
                **predicate_args(arguments, "dkdv"),
                "ALIGNED": alignment(q, k, v, dout, dk, dv), "ONE_PASS": one_pass,
                **places, **constants, **tile_args(tile),
            },
        )  # fmt: skip
    tile = arguments.config.dq
    tiles = sizes.query_tiles(tile.block_m)
    if tiles.number and "dq" in kernels:
        run(
            dq_kernel, (tiles.number,),
            {
                **shared, "dq_ptr": dq, **tiles.in_kernels(), **predicate_args(arguments, "dq"),
                "ALIGNED": alignment(q, k, v, dout, dq), **places, **constants, **tile_args(tile),
            },
        )  # fmt: skip
    if dbias is not None and dbias.numel():
        # The kernel visits padded sequences head by head; it has no order and no total rows.
        asked = shared | predicate_args(arguments, "dq")
        for name in ("order_ptr", "total_q", "total_k"):
            del asked[name]
        shared_axes = [size == 1 for size in dbias.shape]
        over = dict(zip(("OVER_B", "OVER_H", "OVER_M", "OVER_N"), shared_axes, strict=True))
        blocks = (1, 1, tile.block_m, tile.block_n)
        run(
            dbias_kernel, (math.prod(map(cdiv, dbias.shape, blocks)),),
            {
                **asked, "dbias_ptr": dbias, "B": sizes.B, "ALIGNED": alignment(q, k, v, dout),
                **over, **constants, **tile_args(tile),
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
                "q_ptr": q, "k_ptr": k, "lse_ptr": lse, "pooled_ptr": pooled,
                **length_args(arguments),
                **stride_args(arguments, q=q, k=k), "H": H, "G": H // k.shape[1], "M": M, "N": N,
                "D": D, "pool_rows": rows, "pool_keys": keys, **window_args(arguments),
                "mask_args": (0,) if predicate is None else predicate.args,
                "ALIGNED": alignment(q, k), "MAX": pool == "max", **constants, **tile_args(tile),
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
            **dict(zip(STRIDES["k"], k.stride(), strict=True)),
            **dict(zip(STRIDES["v"], v.stride(), strict=True)),
            **dict(zip(("stride_tb", "stride_tp"), self.table.stride(), strict=True)),
            "page_size": self.k.shape[1], "num_pages": self.k.shape[0], "N": self.capacity,
            "D": self.k.shape[3], "Dv": self.v.shape[3],
            "BLOCK_D": padded(self.k.shape[3]), "BLOCK_DV": padded(self.v.shape[3]),
        }  # fmt: skip


def launch_append(cache: Cache, k: torch.Tensor, v: torch.Tensor, seqlens_k: torch.Tensor) -> None:
    """Writes k (B,Hk,L,D) and v (B,Hk,L,Dv) behind the seqlens_k (B,) keys of each entry."""
    B, Hk, L, _ = k.shape
    tiles = cdiv(L, APPENDED_ROWS)
    if B * tiles and cache.capacity:
        strides = (
            *zip(STRIDES["new_k"], k.stride(), strict=True),
            *zip(STRIDES["new_v"], v.stride(), strict=True),
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
    is_wide = alignment(q, cache.k.transpose(1, 2), cache.v.transpose(1, 2))
    constants = _constants(q.dtype, D, Dv, arguments)
    constants["BLOCK_D"], constants["BLOCK_REST"] = _parts(D)
    sizes = {"M": M, "N": cache.capacity, "Dv": Dv, "rows": B * H * M}
    window = window_args(arguments)
    sinks = _cache_sinks(arguments, lse)
    with on_device(q):
        run(
            kvcache_kernel, (programs * (splits if apart else 1),),
            {
                **cache.in_kernels(), **constants, **sizes, "q_ptr": q, "out_ptr": out,
                "lse_ptr": lse, **dict(zip(_SUMS, sums, strict=True)),
                **dict(zip(STRIDES["q"], q.stride(), strict=True)),
                "seqlens_k_ptr": seqlens_k, "tiles_of_head": tiles, "B": B, "Hk": Hk,
                "G": H // Hk, "groups": Hk // cache.v.shape[2], **window,
                "mask_args": (0,) if predicate is None else predicate.args,
                "split_tiles": split_keys // tile.block_n, "apart": int(apart),
                **score_args(arguments), **sinks,
                "ALIGNED": (PAGED.value if cache.is_paged else 0) + is_wide,
                "SHARED": cache.is_shared and Dv == constants["BLOCK_D"], **tile_args(tile),
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
    return padded(head_dim), 0


def _cache_sinks(arguments: Arguments, lse: torch.Tensor) -> dict:
    """Returns the arguments of sinks; without any, lse stands for them."""
    sinks = arguments.sinks
    if sinks is None:
        return {"sinks_ptr": lse, "stride_sink": 0, "sink_heads": 0}
    return {"sinks_ptr": sinks, "stride_sink": sinks.stride(0), "sink_heads": len(sinks)}
