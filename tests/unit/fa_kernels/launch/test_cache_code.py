"""Compiled code of calls with a cache, checked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by

# Bytes of shared memory of a program on a Hopper GPU.
MOST = 227 * 1024


def test_float64_is_computed_alike_for_all_elements_of_a_tile_and_in_both_kernels():
    """One of 16 was scaled by a fused instruction, so that decoding had other bits on a GPU."""
    found = printed_by("tests.unit.fa_kernels.launch.cache_code", "float64")
    assert found == {
        "kvcache_kernel": {"scalings": 16, "fusible": 0},
        "join_kernel": {"scalings": 0, "fusible": 0},
    }


def test_default_tiles_fit_the_shared_memory_of_hopper():
    found = printed_by("tests.unit.fa_kernels.launch.cache_code")
    # Each of 8 calls launches two kernels.
    assert len(found) == 16
    assert {name: shared for name, shared in found.items() if shared > MOST} == {}
