"""What the compiler makes of the kernels for Hopper: seen without a GPU, and decisive on one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by

# Bytes of shared memory that a program of a Hopper GPU may have.
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
def test_products_stay_asynchronous_and_tiles_fit_and_have_their_memory_alone(D):
    found = printed_by("tests.unit.fa_kernels.hopper.hopper_code", str(D))
    assert found.keys() == KERNELS
    for name, code in found.items():
        # ptxas says so where it serialises products, which takes half as long again.
        assert not code["warnings"], (name, code["warnings"])
        assert code["shared"] <= MOST, (name, code["shared"])
        # What is of no use any more, by the compiler's count, is written late nevertheless: of a
        # barrier that nobody used the initialisation was found in what warps had been told.
        assert not code["with_others"], (name, code["with_others"])
