"""What the compiler makes of the kernels for Hopper: seen without a GPU, and decisive on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that a program of a Hopper GPU may have.
MOST = 227 * 1024
KERNELS = {
    "hopper_forward_kernel, one_pass", "hopper_forward_kernel, two_pass",
    "hopper_backward_kernel, one_pass", "hopper_backward_kernel, two_pass",
    "hopper_dq_kernel, two_pass",
}  # fmt: skip


@pytest.mark.parametrize("D", [64, 128])
def test_products_stay_asynchronous_and_tiles_fit(D):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.hopper_code", str(D)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == KERNELS
    for name, code in found.items():
        # ptxas says so where it serialises products, which takes half as long again.
        assert not code["warnings"], (name, code["warnings"])
        assert code["shared"] <= MOST, (name, code["shared"])
