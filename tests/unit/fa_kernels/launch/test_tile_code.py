"""Shared memory of the default tiles, checked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by


def test_default_tiles_of_wide_heads_fit_99_kib():
    """NVIDIA GPUs of compute capability 8.6, 8.9 and 12.0 give a program no more."""
    found = printed_by("tests.unit.fa_kernels.launch.tile_code")
    assert len(found) == 4
    assert {name: shared for name, shared in found.items() if shared > 99 * 1024} == {}
