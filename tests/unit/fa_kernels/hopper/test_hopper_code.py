"""Compiled code of Hopper's kernels, checked without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by

# Bytes of shared memory of a program on a Hopper GPU.
MOST = 227 * 1024
KERNELS = {
    f"hopper_{kernel}{form}"
    for kernel in (
        "forward_kernel, one_pass", "forward_kernel, two_pass", "backward_kernel, one_pass",
        "backward_kernel, two_pass", "dq_kernel, two_pass",
    )
    for form in ("", ", packed")
}  # fmt: skip


@pytest.mark.parametrize("D", [64, 128])
def test_products_are_asynchronous_tiles_fit_and_exponentials_alone_flush(D):
    found = printed_by("tests.unit.fa_kernels.hopper.hopper_code", str(D))
    assert found.keys() == KERNELS
    for name, code in found.items():
        # ptxas warns if it serialises products, which then take 1.5 times as long.
        assert not code["warnings"], (name, code["warnings"])
        assert code["shared"] <= MOST, (name, code["shared"])
        # The compiler reuses a buffer's memory after its last use, but an asynchronous write may
        # come later. The initialisation of an unused barrier overwrote a message to warps.
        assert not code["with_others"], (name, code["with_others"])
        # Elementwise arithmetic keeps subnormal numbers, so the kernels do not declare ``flushes``.
        # The logarithm of the forward's sums has the fused multiply-adds; the sums are at least 1.
        allowed = {"ex2.approx.ftz.f32", *["fma.rn.ftz.f32"] * ("forward" in name)}
        assert set(code["flushes"]) <= allowed, (name, code["flushes"])
