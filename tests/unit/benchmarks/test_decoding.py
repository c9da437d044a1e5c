"""Calls of the benchmark of decoding compute the same attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.decoding import NAMES, calls, table


@pytest.mark.parametrize("sizes", [(2, 128, 4, 2, 16, 16), (2, 128, 2, 1, 576, 512)])
def test_all_calls_are_the_same_attention(sizes, device):
    found = calls(*sizes, device=device, dtype=torch.float32)
    out = found["contiguous"]()
    assert out.shape == (sizes[0], sizes[2], 1, sizes[5])
    # The pages are permuted, and queries attend to all of them, in the table's order.
    assert found["pages of 128"]().shape == found["pages of 16"]().shape == out.shape
    if "SDPA" in found:
        assert torch.allclose(out, found["SDPA"](), atol=1e-5)
    assert [*found] == [name for name in NAMES if name in found]


def test_the_copy_is_a_percentage():
    times = {"contiguous": [2.0], "pages of 16": [4.0], "pages of 128": [1.0], "copy": [1.0]}
    line = table({"rows": [{"problem": (1, 2, 3, 4, 5, 6), "ms": times}]})[-1]
    assert "| 2.000 [2.000, 2.000], 50% | 4.000 [4.000, 4.000], 25% |" in line
    assert "| - |" in line
