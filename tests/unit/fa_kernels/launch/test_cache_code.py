"""Compiled code of calls with a cache, checked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by

# Bytes of shared memory of a program on a Hopper GPU.
MOST = 227 * 1024


def test_default_tiles_fit_the_shared_memory_of_hopper():
    found = printed_by("tests.unit.fa_kernels.launch.cache_code")
    # Each of 8 calls launches two kernels.
    assert len(found) == 16
    assert {name: shared for name, shared in found.items() if shared > MOST} == {}
