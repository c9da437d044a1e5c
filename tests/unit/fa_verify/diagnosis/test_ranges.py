"""The visited tiles of a diagnosis are those of the kernels' integer arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_kernels.kernels.common.tile_ranges import TileRange, split_range, visible_tiles
from fa_verify.diagnosis.named.passes import Case
from fa_verify.diagnosis.named.ranges import any_of, edge, first, full, last, ragged, split_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.tensors import make

ROWS, KEYS = 4, 6
MASKS = [
    Mask(window_left=left, window_right=right, seqlens_q=(rows,), seqlens_k=(keys,))
    for left, right in ((None, None), (None, 0), (5, 2), (3, None), (20, 7))
    for rows, keys in ((17, 23), (16, 24), (9, 23), (17, 5))
]


def case_of(mask, splits=1):
    problem = Problem(M=17, N=24, D=1, Dv=1, dtype="fp64", mask=mask)
    return Case(problem, make(problem), splits)


def ranges_of(case, over_rows):
    """Return the range of each tile by the kernels' source, with its pairs by range of places."""
    x = case.problem
    ((rows,), (keys,)) = x.mask.lengths(1, x.M, x.N)
    unbounded = rows + keys
    left = unbounded if x.mask.window_left is None else x.mask.window_left
    right = unbounded if x.mask.right is None else x.mask.right
    here, there = (keys, rows) if over_rows else (rows, keys)
    sizes = (KEYS, ROWS) if over_rows else (ROWS, KEYS)
    before_after = (right, left) if over_rows else (left, right)
    for start in range(0, x.N if over_rows else x.M, sizes[0]):
        tiles = visible_tiles.fn(start, here, there, *before_after, *sizes)

        def pairs(lo, hi, start=start):
            found = torch.zeros(x.M, x.N, dtype=torch.bool)
            own, other = slice(start, start + sizes[0]), slice(lo * sizes[1], hi * sizes[1])
            found[(other, own) if over_rows else (own, other)] = True
            return found

        yield tiles, pairs


@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_places_are_those_of_the_ranges_of_the_kernels(mask, over_rows):
    case = case_of(mask)
    p = case.plain("dkdv" if over_rows else "forward")
    want = dict.fromkeys((first, last, full, edge), torch.zeros(17, 24, dtype=torch.bool))
    for (lo, full_lo, full_hi, hi), pairs in ranges_of(case, over_rows):
        want[first] = want[first] | pairs(lo, min(lo + 1, hi))
        want[last] = want[last] | pairs(max(hi - 1, lo), hi)
        want[full] = want[full] | pairs(full_lo, full_hi)
        want[edge] = want[edge] | pairs(lo, full_lo) | pairs(full_hi, hi)
    for place, expected in want.items():
        assert torch.equal(place(p, ROWS, KEYS, over_rows)[0, 0], expected), place.__name__


def test_a_ragged_tile_is_the_last_one_that_no_visible_pair_fills():
    p = case_of(Mask(causal=True)).plain("forward")
    # Row m sees the keys up to m + 7: the last row of a tile of 4 ends at 3 + 7, 7 + 7, 11 + 7, ...
    found = ragged(p, ROWS, KEYS, over_rows=False)[0, 0]
    starts = [int(row.int().argmax()) if row.any() else None for row in found[::ROWS]]
    assert starts == [6, 12, 18, 18, None]


@pytest.mark.parametrize(("mask", "splits"), [*itertools.product(MASKS, (1, 2, 3, 5))], ids=str)
def test_splits_are_those_of_the_kernels(mask, splits):
    case = case_of(mask, splits)
    p = case.plain("forward")
    tiles = any_of(p.seen, ROWS, KEYS)
    number = torch.where(tiles, split_of(p, tiles), -1)[0, 0]
    for row, (found, _) in zip(number, ranges_of(case, over_rows=False), strict=True):
        for split in range(splits):
            lo, _, _, hi = split_range.fn(TileRange(*found), split, splits)
            assert (row == split).nonzero().flatten().tolist() == [*range(lo, hi)]
