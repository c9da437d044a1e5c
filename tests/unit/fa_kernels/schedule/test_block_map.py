"""Block maps: each kernel visits the partial and the full tiles of a mask, and no others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.stream import uniform

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.configs import CONFIGS, Tile  # noqa: E402
from fa_kernels.schedule import block_sparse  # noqa: E402
from fa_verify.mask_forms import block_map_faults  # noqa: E402

MASKS = {
    "documents": Document(starts=((16,), (33,))),
    "documents beside a window": Document(starts=((16,), ()), window_left=40, window_right=17),
    "lengths": PrefixLM(prefix=20, seqlens_q=(60, 33), seqlens_k=(40, 66)),
    "whole tiles of lengths": PrefixLM(prefix=16, seqlens_q=(64, 32), seqlens_k=(32, 64)),
    "half a tile": PrefixLM(prefix=48, seqlens_q=(48, 16), seqlens_k=(48, 16)),
    "half a tile of keys": PrefixLM(prefix=48, seqlens_q=(64, 32), seqlens_k=(48, 16)),
    "half a tile of rows": PrefixLM(prefix=64, seqlens_q=(48, 16), seqlens_k=(64, 32)),
    "nothing": PrefixLM(prefix=20, seqlens_q=(0, 70), seqlens_k=(66, 0)),
    "heads": BlockSparse(side=16, percent=50, seed=3),
}


def test_more_tiles_than_can_be_counted_are_refused(device, monkeypatch):
    # They must not be allocated either: they would take 12 GiB.
    monkeypatch.setattr(block_sparse.allocation, "empty", pytest.fail)
    lengths = torch.zeros(2, 1, dtype=torch.int32, device=device).unbind()
    window = 2**20, 2**20
    says = (
        "mask has a predicate, and M = 262144, N = 1048576 make 4,294,967,296 tiles of 32x16; "
        "supported are fewer than 715,827,882"
    )
    with pytest.raises(NotImplementedError) as refused:
        block_sparse.block_maps(
            PrefixLM(), 1, 8, 8, 2**18, 2**20, window, lengths, CONFIGS["32x16"]
        )
    assert str(refused.value) == says


@pytest.mark.parametrize(("M", "N"), [(20, 33), (0, 33), (20, 0)])
def test_lists_are_of_32_bits_and_as_long_as_there_are_tiles(M, N, device):
    lengths = torch.tensor([[M], [N]], dtype=torch.int32, device=device).unbind()
    maps = block_sparse.block_maps(PrefixLM(), 1, 2, 1, M, N, (64, 64), lengths, CONFIGS["16x16"])
    rows, keys = triton.cdiv(M, 16), triton.cdiv(N, 16)
    assert {x.dtype for of_kernel in maps for x in of_kernel} == {torch.int32}
    assert [x.order.shape for x in maps] == [(1, 2, rows), (1, 1, keys), (1, 2, rows)]
    assert maps.forward.lists.shape == maps.dq.lists.shape == (1, 2, rows, 2 + keys)
    assert maps.dkdv.lists.shape == (1, 2, keys, 2 + rows)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("tiles", [1, 64, 150])
def test_tiles_that_visit_most_come_first(heads, tiles, device):
    """The order is by the tiles of a group of heads; ties keep the order of the tiles."""
    B, H = 2, 4
    visited = (uniform(0, "visited", (B, H, tiles + 3, 2)) * 4).to(torch.int32)
    lists = torch.cat([visited, torch.full((B, H, tiles + 3, 5), 99)], 3).to(torch.int32).to(device)
    got = block_sparse._ordered(lists, heads, 16 * tiles - 5, Tile(16, 32))
    work = visited[:, :, :tiles].sum(3).unflatten(1, (heads, -1)).sum(2)
    assert got.lists is lists
    assert got.order.tolist() == work.argsort(descending=True, stable=True).tolist()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_each_kernel_visits_the_tiles_that_hold_a_visible_pair(mask, device):
    problem = Problem(B=2, H=2, M=70, N=66, mask=mask, device=device)
    assert block_map_faults(problem) == []


@triton.jit
def looked_up(b, h, m, n, args):
    return (tl.load(args[0] + m) + tl.load(args[1][0] + n)) % 3 > 0


@dataclass(frozen=True, kw_only=True)
class LookedUp(Mask, uniform=True):
    """A mask whose tables end with the last row and the last key."""

    def mask_mod(self, b, h, m, n, *, M, N):
        return (torch.as_tensor(m) + torch.as_tensor(n)) % 3 > 0

    def native(self, B, H, M, N, device):
        rows, keys = (torch.arange(size, dtype=torch.int8, device=device) for size in (M, N))
        return looked_up, (rows, (keys, keys.float(), keys.long(), 5))


@pytest.mark.parametrize("lengths", [(0, 20), (33, 0), (40, 20), (33, 20), (16, 16)])
def test_a_predicate_is_not_evaluated_on_padding(lengths, device):
    rows, keys = lengths
    mask = LookedUp(seqlens_q=(40, rows), seqlens_k=(20, keys))
    problem = Problem(B=2, M=40, N=20, mask=mask, device=device)
    assert block_map_faults(problem) == []


def test_tables_of_few_bits_are_widened_and_nothing_else(device):
    predicate = block_sparse.predicate_of(LookedUp(), 1, 1, 40, 20, torch.device(device))
    rows, (keys, floats, longs, number) = predicate.args
    assert (rows.dtype, keys.dtype) == (torch.int32, torch.int32)
    assert (floats.dtype, longs.dtype, number) == (torch.float32, torch.int64, 5)
    assert rows.tolist() == list(range(40))


def test_a_mask_without_a_predicate_has_none(device):
    assert block_sparse.predicate_of(Mask(causal=True), 1, 1, 4, 4, torch.device(device)) is None
