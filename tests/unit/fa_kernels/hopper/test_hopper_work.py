"""Work of Hopper's kernels, counted in emulation: hidden tiles are not loaded or multiplied.

Results do not show redundant work. Lengths past the ends of tensors are clamped.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_kernels import flash_attention
from fa_kernels.launch import hopper
from fa_verify.oracles.masks.mask import Mask
from fa_verify.subjects.emulation import emulate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

KEYS = 128
# Rows of a query tile of the backward, by head_dim.
ROWS = {64: 128, 128: 64}
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=100, window_right=30),
    "padded": Mask(seqlens_q=(300, 130), seqlens_k=(0, 257)),
    "padded, causal": Mask(causal=True, seqlens_q=(90, 300), seqlens_k=(280, 128)),
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
each_head_dim = pytest.mark.parametrize("D", [64, 128])


@pytest.fixture
def kernels(monkeypatch):
    """Forward, backward and dq kernels of Hopper, emulated in place of the portable ones."""
    return emulate(fa_kernels, replace=monkeypatch.setattr)


def ran(mask: Mask, D: int, backward: str, M: int = 300, N: int = 290, H: int = 1) -> torch.Tensor:
    """Runs forward and backward of two batch entries and one kv head; the dense mask (B,M,N)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, D, generator=generator).half().requires_grad_()
        for heads, length in ((H, M), (1, N), (1, N))
    )
    out = flash_attention(q, k, v, mask=mask, deterministic=backward == "two_pass")
    out.backward(torch.ones_like(out))
    return mask.dense(2, 1, M, N).expand(2, 1, M, N)[:, 0]


def tiles_seen(seen: torch.Tensor, starts: list[int], rows: int, keys: int) -> list[list[int]]:
    """The number of key tiles that each tile of rows visits, by batch entry.

    A tile of rows visits all key tiles from the first to the last with a visible pair.
    """
    found = []
    for entry in seen:
        of_entry = []
        for start in starts:
            places = entry[start : start + rows].any(0).nonzero().flatten().tolist()
            of_entry.append(places[-1] // keys - places[0] // keys + 1 if places else 0)
        found.append(of_entry)
    return found


def padded_tiles(mask: Mask, seen: torch.Tensor, starts: list[int], rows: int) -> list[list[int]]:
    """The number of visited key tiles with padding for each tile of rows, by batch entry."""
    _, lengths = mask.lengths(2, 300, 290)
    return [
        [
            sum(
                length < min(start + KEYS, 290)
                for start in range(0, 290, KEYS)
                if entry[first : first + rows, start : start + KEYS].any()
            )
            for first in starts
        ]
        for entry, length in zip(seen, lengths, strict=True)
    ]


def is_alike(mask: Mask) -> bool:
    return mask.right is None and mask.window_left is None


def weighted(counts: list[list[int]], weights: list[int]) -> int:
    return sum(x * w for of_entry in counts for x, w in zip(of_entry, weights, strict=True))


def total(counts: list[list[int]]) -> int:
    return sum(map(sum, counts))


def check_forward(work: Counter[str], mask: Mask, D: int, seen: torch.Tensor, H: int) -> None:
    rows, keys = hopper.forward_tile(D)
    consumers = rows // 64
    tiles, narrow = hopper.query_tiles(300, 2 * H, consumers, 4, is_alike(mask))
    starts = [(i * consumers - min(i, narrow)) * 64 for i in range(tiles)]
    active = [consumers - (i < narrow) for i in range(tiles)]
    counts = tiles_seen(seen, starts, rows, keys)
    assert work["k_desc"] == work["v_desc"] == H * total(counts)
    assert work["products"] == 2 * H * weighted(counts, active)
    # Stored: zeros in padding of v, and the index of the next work tile.
    cleared = weighted(padded_tiles(mask, seen, starts, rows), active)
    turns = (2 * H * tiles + work["programs"]) * consumers
    assert work["stored"] == H * cleared * KEYS * D + turns


def check_backward(
    work: Counter[str], mask: Mask, D: int, seen: torch.Tensor, H: int, one_pass: bool
) -> None:
    counts = tiles_seen(seen.mT, list(range(0, 290, KEYS)), KEYS, ROWS[D])
    steps = H * total(counts)
    assert work["q_desc"] == work["dout_desc"] == steps
    # Every program multiplies scores before it tests whether its range of tiles is empty.
    each, shares = hopper.tile_shares(6, 4) if is_alike(mask) else (1, 1)
    programs = 6 + each * (shares - 1)
    assert work["programs"] == programs
    # A key tile is loaded in two halves; hidden tiles are not loaded.
    used = work["k_desc"] // 2
    # Products are S, dP, dV, dK, and dQ for the keys of both consumers. dQ runs a step behind, so
    # there is one more, and the first result is discarded.
    assert work["products"] == 2 * (steps * 4 + programs + 2 * (steps + used) * one_pass)
    assert work["added"] == steps * ROWS[D] * D * one_pass
    assert work["k_desc"] == work["v_desc"] == 2 * used
    assert sum(map(bool, (*counts[0], *counts[1]))) <= used <= programs


def stored_a_step(D: int, backward: str) -> int:
    """Numbers stored for each step: lse2 and delta, and in one pass dS of both consumers."""
    return 2 * ROWS[D] + (2 * ROWS[D] * 64 if backward == "one_pass" else 0)


def check_dq(work: Counter[str], mask: Mask, D: int, seen: torch.Tensor) -> None:
    starts = list(range(0, 300, 128))
    counts = tiles_seen(seen, starts, 128, KEYS)
    assert work["k_desc"] == work["v_desc"] == total(counts)
    assert work["products"] == 2 * 3 * total(counts)
    # Both consumers clear padding keys.
    cleared = total(padded_tiles(mask, seen, starts, 128))
    assert work["stored"] == 2 * cleared * KEYS * D


@each_mask
@each_head_dim
def test_two_passes_load_and_multiply_tiles_that_are_seen(mask, D, kernels):
    # If all tiles take equally long, two of six tiles are shared, of keys and of queries.
    assert hopper.tile_shares(6, 4) != (1, 1)
    seen = ran(mask, D, "two_pass", H=1)
    forward, backward, dq = (x.work for x in kernels)
    check_forward(forward, mask, D, seen, 1)
    check_backward(backward, mask, D, seen, 1, one_pass=False)
    check_dq(dq, mask, D, seen)


@each_mask
@each_head_dim
def test_one_pass_loads_and_multiplies_tiles_that_are_seen(mask, D, kernels):
    seen = ran(mask, D, "one_pass", H=2)
    forward, backward, _ = (x.work for x in kernels)
    check_forward(forward, mask, D, seen, 2)
    check_backward(backward, mask, D, seen, 2, one_pass=True)


# Half key tiles with padding, whose keys are cleared for dq.
@each_head_dim
@pytest.mark.parametrize(("backward", "halves"), [("one_pass", 3), ("two_pass", 0)])
@pytest.mark.parametrize("seqlens_k", [None, (192, 130)])
def test_the_backward_clears_nothing_but_keys_of_padding(D, backward, halves, seqlens_k, kernels):
    ran(Mask(seqlens_k=seqlens_k), D, backward, M=256, N=256)
    cleared = halves * 64 * D if seqlens_k else 0
    work = kernels[1].work
    assert work["stored"] == work["q_desc"] * stored_a_step(D, backward) + cleared


@each_head_dim
@pytest.mark.parametrize("backward", ["one_pass", "two_pass"])
def test_no_product_is_waited_for_at_once(D, backward, kernels):
    ran(Mask(causal=True), D, backward)
    assert not any(x.work["synchronous"] for x in kernels)


@each_head_dim
@pytest.mark.parametrize("backward", ["one_pass", "two_pass"])
@pytest.mark.parametrize(("N", "tiles"), [(255, 0), (254, 1)])
def test_the_backward_clears_rows_alone_that_see_no_key(N, tiles, D, backward, kernels):
    # Such rows are the first of the second query tile; the first tile is not visited.
    ran(Mask(window_right=1), D, backward, 256 + ROWS[D], N)
    # Both consumers of the first key tile clear queries and dout. They also clear the queries after
    # the last edge tile, which can belong to another head.
    cleared = 2 * tiles * 2 * 3 * ROWS[D] * D
    work = kernels[1].work
    assert work["stored"] == work["q_desc"] * stored_a_step(D, backward) + cleared


# Bytes of 64 x 64 elements of 16 bits, and of a barrier.
BLOCK, BARRIER = 8192, 8
# (blocks, other bytes) by kernel and head_dim; the others are row statistics and barriers.
SHARED = {
    ("forward", 64): (3 + 3 * (2 + 2), 3 * 4 + (2 * 3 + 4 * 3) * BARRIER),
    ("forward", 128): (2 * (2 + 2 * (2 + 2)), 2 * 4 + (2 * 2 + 4 * 2) * BARRIER),
    # Keys and values; queries and dout; three stages of dS in two halves.
    ("one_pass", 64): (4 + 8 + 3 * 4, 2 * 2 * 128 * 4 + 10 * BARRIER),
    ("one_pass", 128): (8 + 8 + 3 * 2, 2 * 2 * 64 * 4 + 10 * BARRIER),
    # An unused block of dS.
    ("two_pass", 64): (4 + 8 + 2, 2 * 2 * 128 * 4 + 10 * BARRIER),
    ("two_pass", 128): (8 + 8 + 1, 2 * 2 * 64 * 4 + 10 * BARRIER),
    ("dq", 64): (2 + 2 + 4 * (2 + 2), (2 + 3 * 4) * BARRIER),
    ("dq", 128): (2 * (2 + 2 + 2 * (2 + 2)), (2 + 3 * 2) * BARRIER),
}


@each_head_dim
@pytest.mark.parametrize(
    ("name", "place"), [("forward", 0), ("one_pass", 1), ("two_pass", 1), ("dq", 2)]
)
def test_shared_memory_is_for_tiles_rows_and_barriers(name, place, D, kernels):
    ran(Mask(), D, "one_pass" if name == "one_pass" else "two_pass")
    blocks, others = SHARED[name, D]
    work = kernels[place].work
    assert work["shared"] == work["programs"] * (blocks * BLOCK + others)


# The compiler may reuse the memory of a barrier without waits, and its initialisation would
# overwrite the other buffer.
@each_head_dim
@pytest.mark.parametrize("backward", ["one_pass", "two_pass"])
def test_barriers_that_nobody_waits_for_are_not_initialised(D, backward, kernels):
    ran(Mask(), D, backward, M=700, N=700)
    for kernel in kernels[: 2 if backward == "one_pass" else 3]:
        assert kernel.waits
        assert all(kernel.waits.values()), kernel.waits


@each_head_dim
@pytest.mark.parametrize("backward", ["one_pass", "two_pass"])
def test_lengths_past_the_tensors_are_those_of_the_tensors(D, backward, kernels):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, 1, 150, D, generator=generator).half().requires_grad_() for _ in range(3)
    ]

    def results(lengths):
        out = flash_attention(
            *leaves,
            causal=True,
            deterministic=backward == "two_pass",
            seqlens_q=lengths,
            seqlens_k=lengths,
        )
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    wanted = results(None)
    done = [x.work.copy() for x in kernels]
    found = results(torch.tensor([151, 2**31 - 1], dtype=torch.int32))
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        # dq of one pass is summed in another order in every run.
        if (backward, i) == ("one_pass", 1):
            torch.testing.assert_close(x, y)
        else:
            assert torch.equal(x, y)
    assert [x.work for x in kernels] == [y + y for y in done]


@pytest.mark.parametrize(
    ("D", "rise", "rescaled"),
    [
        (128, hopper.RESCALE_THRESHOLD, False),
        (128, hopper.RESCALE_THRESHOLD + 1, True),
        (64, 5, True),
    ],
)
def test_sums_are_rescaled_where_a_maximum_has_risen_by_more_than_the_threshold(
    D, rise, rescaled, kernels
):
    """A weight of 2^-20 relative to the old maximum underflows in fp16 if the maximum is 2^5."""
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
    assert out[0, 0, 0, 0].item() == pytest.approx(0 if rescaled else 2**-6 / weights, rel=1e-3)
