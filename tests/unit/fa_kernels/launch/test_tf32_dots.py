"""TF32 dots convert no operand before tensor cores truncate it, as our kernels declare."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.fa_kernels.launch.compiling import printed_by


def test_no_operand_of_a_tf32_dot_is_converted() -> None:
    assert printed_by("tests.unit.fa_kernels.launch.tf32_dots") == {
        "sm_80, 16 rows": ["mma"], "sm_80, 64 rows": ["mma"],
        "sm_90, 16 rows": ["mma"], "sm_90, 64 rows": ["wgmma"],
        "sm_100, 16 rows": ["mma"], "sm_100, 64 rows": ["tcgen05"],
    }  # fmt: skip


def test_a_conversion_is_seen() -> None:
    from tests.unit.fa_kernels.launch.tf32_dots import instructions

    ptx = "cvt.rna.tf32.f32 %r1, %f1;\nmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f2}"
    assert instructions(ptx) == ["cvt", "mma"]
