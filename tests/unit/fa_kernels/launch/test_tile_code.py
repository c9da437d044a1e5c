"""Shared memory of the default tiles, checked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by


@pytest.fixture(scope="module")
def code():
    return printed_by("tests.unit.fa_kernels.launch.tile_code")


def test_default_tiles_of_wide_heads_fit_99_kib(code):
    """NVIDIA GPUs of compute capability 8.6, 8.9 and 12.0 give a program no more."""
    assert len(code["shared"]) == 4
    assert {name: shared for name, shared in code["shared"].items() if shared > 99 * 1024} == {}


def test_default_tiles_of_fp32_need_little_local_memory(code):
    """CUDA allocates local memory for all threads that a GPU can run: 0.26 GiB a KiB on an H100.

    With tiles that are too large for its registers, ptxas keeps nearly all of a thread there.
    """
    assert len(code["local"]) == 2
    assert {D: size for D, size in code["local"].items() if size > 2048} == {}
