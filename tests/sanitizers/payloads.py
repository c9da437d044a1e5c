"""The integers that FpSan computes with, for float32 tensors."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import fpsan

__all__ = ["payloads"]

_SIZE = 128


@gluon.jit
def _payloads(x_ptr, payloads_ptr, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places = gl.program_id(0) * SIZE + gl.arange(0, SIZE, LAYOUT)
    gl.store(payloads_ptr + places, fpsan.embed(gl.load(x_ptr + places)))


def payloads(x: torch.Tensor) -> torch.Tensor:
    """Returns the payloads of a contiguous float32 tensor of a multiple of 128 elements, int64."""
    found = torch.empty_like(x, dtype=torch.int32)
    _payloads[(x.numel() // _SIZE,)](x, found, SIZE=_SIZE, num_warps=4)
    return found.long()
