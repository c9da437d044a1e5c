"""A kernel is compiled once for lengths, strides and alignments with the same width of loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from fa_kernels import flash_attention


def backward_of(M: int, N: int, *, first: int, columns_first: bool = False) -> None:
    """Runs forward and backward on tensors at an offset, with a head_dim that loads narrowly."""
    tensors = []
    for rows in (M, N, N):
        storage = torch.randn(first + 2 * rows * 24, device="cuda", requires_grad=True)
        shape = (1, 2, 24, rows) if columns_first else (1, 2, rows, 24)
        x = storage[first:].view(shape)
        tensors.append(x.mT if columns_first else x)
    flash_attention(*tensors, causal=True).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles, so it needs a GPU")
def test_neither_alignment_nor_stride_nor_length_compiles_anew(monkeypatch):
    backward_of(33, 20, first=1)
    compiled = []

    def listener(**event):
        compiled.append(event)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    backward_of(33, 20, first=0, columns_first=True)
    backward_of(1, 16, first=1, columns_first=True)
    backward_of(64, 48, first=3)
    assert not compiled
