"""Aligned rows are read and written 16 bytes at a time, which the kernels' speed depends on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import Config, flash_attention
from fa_kernels.runtime import launch_cache
from tests.unit.fa_kernels.launch.compiling import printed_by

NARROW = {".b8", ".b16", ".u16"}


def test_the_acts_that_kernels_share_are_wide_where_rows_are_aligned():
    # A tile of 64 x 128 and 128 threads: 8 accesses of 8 numbers, or 16 of 4 float32.
    assert printed_by("tests.unit.fa_kernels.launch.aligned_copy") == {
        "1": {"ld.v4.b32": 24, "st.v4.b32": 8},
        "0": {"ld.b16": 64, "st.b16": 64},
        # 64 x 128 float32 for 128 threads, and a block of 64 x 64.
        "rows": {"ld.v4.b32": 16, "st.v4.b32": 16},
        "blocks": {"add.v4.f32": 8},
        # lse2 and delta of 32 rows, and 512 zeros for 128 threads.
        "zeros": {"st.b32": 2, "st.v4.b32": 1},
    }


@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("D", [64, 128])
def test_no_compiled_kernel_reads_or_writes_16_bits_at_a_time(
    D, hopper, backward, device, monkeypatch
):
    if device == "cpu":
        pytest.skip("nothing is compiled in the interpreter")
    from tests.unit.fa_kernels.launch.aligned_copy import accesses

    monkeypatch.setattr(launch_cache, "_compiled", {})
    q, k, v = (
        torch.randn(1, 2, 300, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    out = flash_attention(
        q, k, v, config=Config(hopper=hopper), deterministic=backward == "two_pass"
    )
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    of = {code.name: accesses(code.asm["ptx"]) for code in launch_cache._compiled.values()}
    assert len(of) >= 3
    narrow = {
        name: widths
        for name, widths in of.items()
        if any(width.endswith(narrow) for width in widths for narrow in NARROW)
    }
    assert not narrow
