"""The ways of each case that a benchmark times compute the same attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cases import CASES, decoding, density, few_queries, main, packed, table


@pytest.mark.parametrize("sizes", [(2, 128, 4, 2, 16, 16), (2, 128, 2, 1, 576, 512)])
def test_all_calls_of_a_cache_are_the_same_attention(sizes, device):
    ways = decoding(*sizes, device=device, dtype=torch.float32)
    assert CASES["decoding"].reference in ways
    out = ways["contiguous"]()
    assert out.shape == (sizes[0], sizes[2], 1, sizes[5])
    # The pages are permuted, and queries attend to all of them, in the table's order.
    assert ways["pages of 128"]().shape == ways["pages of 16"]().shape == out.shape
    if "SDPA" in ways:
        assert torch.allclose(out, ways["SDPA"](), atol=1e-5)


def test_parts_change_no_more_than_roundings(device):
    ways = few_queries(1, 300, 2, 1, 16, device=device)
    wanted = ways.pop(CASES["few_queries"].reference)()
    for call in ways.values():
        assert torch.allclose(call(), wanted, atol=1e-2)


@pytest.mark.parametrize("backward", [False, True])
def test_fewer_blocks_are_visible_from_density_to_density(backward, device):
    ways = density(1, 256, 1, 16, backward, device=device)
    assert CASES["density"].reference in ways
    seen = [call() for call in ways.values()]
    outs = [x[2] if backward else x for x in seen]
    assert all(x.shape == (1, 1, 256, 16) for x in outs)
    assert not torch.equal(outs[0], outs[-1])


def test_packed_ways_give_the_same_gradients(device):
    ways = packed((5, 3), H=1, D=16, device=device)
    padded = ways.pop(CASES["packed"].reference)()
    others = [call() for call in ways.values()]
    assert [x.shape for x in padded] == [(2, 1, 5, 16)] * 3
    for gradients in others:
        assert all(map(torch.equal, gradients, others[0]))


def test_a_table_has_ratios_to_the_reference():
    times: Mapping[str, Mapping[str, Sequence[float]]] = {
        "a": {"x": [2.0], "y": [4.0], "copy": [1.0]}, "b": {"x": [1.0], "copy": [1.0]}
    }  # fmt: skip
    head, _, a, b = table("copy", times)
    assert head == "| problem | x | y | copy |"
    assert "| 2.000 [2.000, 2.000], 0.50 | 4.000 [4.000, 4.000], 0.25 |" in a
    assert "| 1.000 [1.000, 1.000], 1.00 | - |" in b


def test_a_case_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["speed"])
    assert f"needs some of {sorted(CASES)}" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_timed(capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible")
    assert main([]) == main(["packed"]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().out
