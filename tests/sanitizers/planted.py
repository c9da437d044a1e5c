"""Kernels with one fault each, for compute-sanitizer to find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["PLANTED"]

_NUMBERS = 128


@triton.jit
def _write_past_the_end(ptr, NUMBERS: tl.constexpr):
    tl.store(ptr + NUMBERS + tl.arange(0, NUMBERS), 1)


@triton.jit
def _diverge(ptr, NUMBERS: tl.constexpr):
    places = tl.arange(0, NUMBERS)
    # 16 threads of the first warp wait at a barrier that the others do not reach.
    found = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 16; @p bar.sync 0; mov.u32 $0, $1; }",
        "=r,r", [places], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(ptr + places, found)


@gluon.jit
def _stores(tile, ptr, NUMBERS: gl.constexpr, LAYOUT: gl.constexpr):
    tile.store(gl.arange(0, NUMBERS, LAYOUT))


@gluon.jit
def _loads(tile, ptr, NUMBERS: gl.constexpr, LAYOUT: gl.constexpr):
    gl.store(ptr + gl.arange(0, NUMBERS, LAYOUT), tile.load(LAYOUT))


@gluon.jit
def _race(ptr, NUMBERS: gl.constexpr):
    """One warpgroup loads what another stores, and no barrier orders them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [
            (_stores, (tile, ptr, NUMBERS, LAYOUT)),
            (_loads, (tile, ptr, NUMBERS, LAYOUT)),
        ],
        [4],
        [24],
    )


def _launch(kernel) -> None:  # type: ignore[no-untyped-def]
    numbers = torch.zeros(_NUMBERS, dtype=torch.int32, device="cuda")
    kernel[(1,)](numbers, NUMBERS=_NUMBERS, num_warps=4)
    torch.cuda.synchronize()


PLANTED = {
    "memcheck": lambda: _launch(_write_past_the_end),
    "racecheck": lambda: _launch(_race),
    "synccheck": lambda: _launch(_diverge),
}
