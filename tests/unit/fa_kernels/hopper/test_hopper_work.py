"""Waste in the kernels for Hopper, counted by the emulator: results do not show it.

Counted are tiles loaded in vain, rows cleared in vain, products that a warpgroup waits for at once,
and sums rescaled too early or too late.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_kernels import flash_attention
from fa_kernels.launch import hopper
from fa_verify.oracles.masks.mask import Mask
from tests.altered.emulation import emulate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

KEYS = 128
# Query rows of a tile of the backward.
ROWS = {64: 128, 128: 64}
# The tiles are unequal, so that no two programs share one.
MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(window_left=20, window_right=30),
    "padded, causal": Mask(causal=True, seqlens_q=(90, 384), seqlens_k=(280, 128)),
}
each_head_dim = pytest.mark.parametrize("D", [64, 128])
each_backward = pytest.mark.parametrize("backward", ["one_pass", "two_pass"])


@pytest.fixture
def kernels(monkeypatch):
    """Forward, backward and dq kernels of Hopper, emulated in place of the portable ones."""
    return emulate(fa_kernels, replace=monkeypatch.setattr)


def run(mask: Mask, D: int, backward: str, M: int = 384, N: int = 290) -> torch.Tensor:
    """Runs forward and backward of two batch entries and one head; visible pairs (B, M, N).

    M is a multiple of all query tiles by default, so that none of the forward's is narrow.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 1, length, D, generator=generator).half().requires_grad_()
        for length in (M, N, N)
    )
    out = flash_attention(q, k, v, mask=mask, deterministic=backward == "two_pass")
    out.backward(torch.ones_like(out))
    return mask.dense(2, 1, M, N).expand(2, 1, M, N)[:, 0]


def visible_tiles(seen: torch.Tensor, rows: int, columns: int) -> list[int]:
    """For each tile of rows, the tiles of columns from its first to its last visible pair."""
    found = []
    for entry in seen:
        for tile in entry.split(rows):
            places = tile.any(0).nonzero().flatten().tolist()
            found.append(places[-1] // columns - places[0] // columns + 1 if places else 0)
    return found


@each_head_dim
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_kernels_load_only_tiles_with_a_visible_pair(mask, D, kernels):
    seen = run(mask, D, "two_pass")
    forward, backward, dq = (kernel.work for kernel in kernels)
    for work, rows in ((forward, hopper.forward_tile(D)[0]), (dq, KEYS)):
        assert work["k_desc"] == work["v_desc"] == sum(visible_tiles(seen, rows, KEYS))
    of_keys = visible_tiles(seen.mT, KEYS, ROWS[D])
    assert backward["q_desc"] == backward["dout_desc"] == sum(of_keys)
    # A key tile is loaded by halves, unless no query sees it.
    assert backward["k_desc"] == backward["v_desc"] == 2 * sum(map(bool, of_keys))


def cleared(work, D: int, backward: str) -> int:
    """Numbers that the backward cleared in shared memory; a step stores lse2, delta and dS."""
    step = 2 * ROWS[D] + (2 * ROWS[D] * 64 if backward == "one_pass" else 0)
    return work["stored"] - work["q_desc"] * step


@each_head_dim
@each_backward
@pytest.mark.parametrize("causal", [False, True])
def test_no_tile_is_cleared_without_padding_where_all_rows_see_a_key(causal, D, backward, kernels):
    run(Mask(causal=causal), D, backward, M=256, N=256)
    forward, of_keys, dq = (kernel.work for kernel in kernels)
    # The forward stores work-tile indices alone.
    assert forward["stored"] < KEYS * D
    assert cleared(of_keys, D, backward) == dq["stored"] == 0


@each_head_dim
@each_backward
def test_the_backward_clears_keys_of_padding_for_dq_alone(D, backward, kernels):
    run(Mask(seqlens_k=(192, 130)), D, backward, M=256, N=256)
    # Three halves of key tiles hold padding.
    halves = 3 if backward == "one_pass" else 0
    assert cleared(kernels[1].work, D, backward) == halves * 64 * D


@each_head_dim
@each_backward
@pytest.mark.parametrize(("N", "tiles"), [(255, 0), (254, 1)])
def test_the_backward_clears_only_rows_that_see_no_key(N, tiles, D, backward, kernels):
    # The first rows of the second query tile; the first query tile is not visited.
    run(Mask(window_right=1), D, backward, 256 + ROWS[D], N)
    # Both consumers of the first key tile clear queries and dout; and the queries behind the last
    # edge tile, which may be the first ones of another head.
    assert cleared(kernels[1].work, D, backward) == 2 * tiles * 2 * 3 * ROWS[D] * D


@each_head_dim
@each_backward
def test_no_product_is_waited_for_at_once(D, backward, kernels):
    run(Mask(causal=True), D, backward)
    assert not any(kernel.work["synchronous"] for kernel in kernels)


@each_head_dim
def test_sums_are_rescaled_wherever_a_maximum_has_risen(D, kernels):
    """A weight of 2^-20 relative to the old maximum underflows in fp16 if the maximum is 2^5.

    Weights relative to an old maximum have larger roundings.
    """
    rise = 5
    q, k, v = (
        torch.zeros(1, 1, 1, D),
        torch.zeros(1, 1, 2 * KEYS, D),
        torch.zeros(1, 1, 2 * KEYS, D),
    )
    q[..., 0] = 1
    k[0, 0, KEYS : KEYS + 2, 0] = torch.tensor([rise, -20.0])
    v[0, 0, KEYS + 1, 0] = 2.0**14
    # The scale makes scores exponents of 2.
    out = flash_attention(q.half(), k.half(), v.half(), sm_scale=math.log(2))
    weights = 2 * KEYS - 2 + 2.0**rise
    assert weights > 32
    assert out[0, 0, 0, 0].item() == 0
