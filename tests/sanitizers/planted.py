"""Kernels with one fault each, for compute-sanitizer to find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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


@triton.jit
def _race(ptr, NUMBERS: tl.constexpr):
    places = tl.arange(0, NUMBERS)
    # A sum over 4 warps allocates 4 words of shared memory.
    total = tl.sum(places, 0)
    # Each warp stores a word and loads that of its neighbour, with no barrier between.
    found = tl.inline_asm_elementwise(
        "{ .reg .b32 words; mov.b32 words, global_smem; mad.lo.u32 $0, $1, 4, words; "
        "st.shared.b32 [$0], $1; xor.b32 $0, $1, 1; mad.lo.u32 $0, $0, 4, words; "
        "ld.shared.b32 $0, [$0]; }",
        "=&r,r", [places // 32], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(ptr + places, found + total)


def _launch(kernel) -> None:  # type: ignore[no-untyped-def]
    numbers = torch.zeros(_NUMBERS, dtype=torch.int32, device="cuda")
    kernel[(1,)](numbers, NUMBERS=_NUMBERS, num_warps=4)
    torch.cuda.synchronize()


PLANTED = {
    "memcheck": lambda: _launch(_write_past_the_end),
    "racecheck": lambda: _launch(_race),
    "synccheck": lambda: _launch(_diverge),
}
