"""Ranges of visited and of unmasked tiles, against the dense mask for every small size.

In one direction a query tile visits key tiles (forward, dq). In the other a key tile visits query
tiles (dk/dv).
"""

from __future__ import annotations

import operator
import types
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.stream import integers

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.kernels.common.block_info import nth_tile, tile_count  # noqa: E402
from fa_kernels.kernels.common.tile_ranges import (  # noqa: E402
    TileRange,
    share_of,
    tile_of_head,
    visible_tiles,
)
from fa_kernels.validation.arguments import MAX_SEQLEN  # noqa: E402

SIZE = 9
LENGTHS = tuple((q, k) for q in range(SIZE + 1) for k in range(SIZE + 1))
WINDOWS = (*range(SIZE + 2), None)
BLOCKS = (1, 2, 3, 4, 8)
QUERIES, KEYS = 2, 3  # axes of the dense masks, one of which holds the visiting tile
EVERY_CASE = [
    pytest.param((axis, here, there), id=f"{name}-{here}-{there}")
    for axis, name in ((QUERIES, "keys_of_queries"), (KEYS, "queries_of_keys"))
    for here in BLOCKS
    for there in BLOCKS
]


@lru_cache(maxsize=1)
def dense() -> np.ndarray:
    """Dense masks, bool (window_left, window_right, lengths, M, N), with padding."""
    seqlens_q, seqlens_k = zip(*LENGTHS, strict=True)
    masks = [
        Mask(window_left=left, window_right=right, seqlens_q=seqlens_q, seqlens_k=seqlens_k)
        for left in WINDOWS
        for right in WINDOWS
    ]
    seen = torch.cat([mask.dense(len(LENGTHS), 1, SIZE, SIZE) for mask in masks])
    return seen.view(len(WINDOWS), len(WINDOWS), len(LENGTHS), SIZE, SIZE).numpy()


class Ranges(NamedTuple):
    """Integers (window_left, window_right, lengths, tiles of the visiting sequence)."""

    lo: np.ndarray
    full_lo: np.ndarray
    full_hi: np.ndarray
    hi: np.ndarray


class Case(NamedTuple):
    """Bools (window_left, window_right, lengths, visiting tile, tile of the other sequence)."""

    ranges: Ranges
    visited: np.ndarray
    unmasked: np.ndarray
    any_visible: np.ndarray
    all_visible: np.ndarray
    holds_padding: np.ndarray
    is_padding: np.ndarray  # whether the visiting tile is padding


def tiles_of(block: int) -> int:
    """The number of tiles that cover the longest length, plus one."""
    return -(-SIZE // block) + 1


# The functions' Python source, with min and max of arrays: one call computes every window and
# length.
of_arrays = types.FunctionType(
    visible_tiles.fn.__code__,
    {"min": np.minimum, "max": np.maximum, "TileRange": TileRange},
    "of_arrays",
)


def ranges(axis: int, block_here: int, block_there: int) -> Ranges:
    """The ranges of every tile by the Python source, for all windows and lengths."""
    bounds = np.array([2 * SIZE if bound is None else bound for bound in WINDOWS])
    left, right = bounds[:, None, None], bounds[None, :, None]
    before, after = (left, right) if axis == QUERIES else (right, left)
    lengths = np.array(LENGTHS) if axis == QUERIES else np.array(LENGTHS)[:, ::-1]
    shape = (len(WINDOWS), len(WINDOWS), len(LENGTHS), tiles_of(block_here))
    found = Ranges(*(np.full(shape, -1) for _ in Ranges._fields))
    for here in range(SIZE + 1):
        chosen = np.flatnonzero(lengths[:, 0] == here)
        there = lengths[chosen, 1]
        for tile in range(tiles_of(block_here)):
            start = tile * block_here
            results = of_arrays(start, here, there, before, after, block_here, block_there)
            for field, result in zip(found, results, strict=True):
                field[:, :, chosen, tile] = result
    return found


def tiled(of_pairs: np.ndarray, axis: int, block_here: int, block_there: int) -> np.ndarray:
    """(..., M, N) as (..., tiles here, elements, tiles there, elements), False past the end."""
    if axis == KEYS:
        of_pairs = of_pairs.swapaxes(-1, -2)
    blocks, tiles = (block_here, block_there), (tiles_of(block_here), tiles_of(block_there))
    sizes = [block * count for block, count in zip(blocks, tiles, strict=True)]
    padded = np.zeros((*of_pairs.shape[:-2], *sizes), dtype=bool)
    padded[..., :SIZE, :SIZE] = of_pairs
    return padded.reshape(*of_pairs.shape[:-2], tiles[0], block_here, tiles[1], block_there)


@pytest.fixture(scope="module", params=EVERY_CASE)
def case(request) -> Case:
    axis, _, block_there = blocks = request.param
    seqlens_q, seqlens_k = np.array(LENGTHS).T[:, :, None]
    rows, keys = np.arange(SIZE) < seqlens_q, np.arange(SIZE) < seqlens_k
    here = rows[:, :, None] if axis == QUERIES else keys[:, None, :]
    there = keys[:, None, :] if axis == QUERIES else rows[:, :, None]
    pairs = (len(LENGTHS), SIZE, SIZE)
    seen = tiled(dense(), *blocks)
    # Padding rows of the visiting tile see nothing.
    asking = tiled(np.broadcast_to(here, pairs), *blocks).any((-1, -2))
    valid_there = tiled(np.broadcast_to(there, pairs), *blocks).any(-3)
    found = ranges(*blocks)
    tile = np.arange(tiles_of(block_there))
    return Case(
        ranges=found,
        visited=(found.lo[..., None] <= tile) & (tile < found.hi[..., None]),
        unmasked=(found.full_lo[..., None] <= tile) & (tile < found.full_hi[..., None]),
        any_visible=seen.any((-1, -3)),
        all_visible=(seen.all(-1) | ~asking[..., None]).all(-2) & asking.any(-1)[..., None],
        holds_padding=~valid_there.all(-1),
        is_padding=~asking.any(-1),
    )


def first(wrong: np.ndarray) -> str:
    """A description of the first index where ``wrong`` is true; empty if there is none."""
    if not wrong.any():
        return ""
    places = np.argwhere(wrong)
    left, right, lengths, *tiles = places[0]
    return (
        f"window ({WINDOWS[left]}, {WINDOWS[right]}), lengths {LENGTHS[lengths]}, "
        f"tile {' with '.join(map(str, tiles))}, and {len(places) - 1} more"
    )


def test_visited_tiles_are_those_with_a_visible_pair(case):
    assert first(case.visited != case.any_visible) == ""


def test_unmasked_tiles_are_visible_to_every_valid_element(case):
    assert first(case.unmasked & ~case.all_visible) == ""


def test_unmasked_tiles_hold_no_padding(case):
    assert first(case.unmasked & case.holds_padding) == ""


def test_wholly_visible_tiles_are_all_unmasked(case):
    assert first(case.all_visible & ~case.unmasked) == ""


def test_the_three_parts_follow_each_other(case):
    lo, full_lo, full_hi, hi = case.ranges
    assert first((lo < 0) | (lo > full_lo) | (full_lo > full_hi) | (full_hi > hi)) == ""


def test_a_tile_of_padding_visits_nothing(case):
    assert case.is_padding.any()
    assert first((case.ranges.lo != case.ranges.hi) & case.is_padding) == ""


class KernelInt:
    """A kernel's int: 32 bits, and no // or % of negative values, because C truncates.

    It supports only the arithmetic of the ranges.
    """

    def __init__(self, value: int) -> None:
        self.value = operator.index(value)
        if not -(2**31) <= self.value < 2**31:
            raise OverflowError(f"{self.value} does not fit 32 bits")

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"KernelInt({self.value})"

    def __add__(self, other: KernelInt | int) -> KernelInt:
        return KernelInt(self.value + operator.index(other))

    def __radd__(self, other: int) -> KernelInt:
        return KernelInt(other + self.value)

    def __sub__(self, other: KernelInt | int) -> KernelInt:
        return KernelInt(self.value - operator.index(other))

    def __rsub__(self, other: int) -> KernelInt:
        return KernelInt(other - self.value)

    def __floordiv__(self, other: KernelInt | int) -> KernelInt:
        return KernelInt(self._dividend("//") // operator.index(other))

    def __mod__(self, other: KernelInt | int) -> KernelInt:
        return KernelInt(self._dividend("%") % operator.index(other))

    def __lt__(self, other: KernelInt | int) -> bool:
        return self.value < operator.index(other)

    def __le__(self, other: KernelInt | int) -> bool:
        return self.value <= operator.index(other)

    def __gt__(self, other: KernelInt | int) -> bool:
        return self.value > operator.index(other)

    def __ge__(self, other: KernelInt | int) -> bool:
        return self.value >= operator.index(other)

    def _dividend(self, sign: str) -> int:
        if self.value < 0:
            raise ArithmeticError(f"{self.value} {sign}: floors in Python, truncates in a kernel")
        return self.value


class Call(NamedTuple):
    """The arguments of a call of visible_tiles without its block sizes."""

    start: int
    seqlen_here: int
    seqlen_there: int
    before: int
    after: int


def drawn_calls(count: int, longest: int, block_here: int) -> list[Call]:
    """Draws lengths and windows in [0, longest], and starts of tiles within a tensor.

    One window in four is unbounded, given as the sum of the longest lengths.
    """
    words = [integers(0, f"ranges/{name}", (count,)).abs() for name in Call._fields]
    lengths = [(word >> 8) % (longest + 1) for word in words[1:3]]
    windows = [
        torch.where(word % 4 == 0, 2 * longest, (word >> 8) % (longest + 1)) for word in words[3:]
    ]
    starts = (words[0] >> 8) % (longest // block_here + 1) * block_here
    columns = (starts, *lengths, *windows)
    return [Call(*row) for row in torch.stack(columns, dim=1).tolist()]


def on_the_host(call: Call, block_here: int, block_there: int) -> list[int]:
    """The result of the Python source on a kernel's ints."""
    results = visible_tiles.fn(*map(KernelInt, call), block_here, block_there)
    return [operator.index(result) for result in results]


def elements_seen(call: Call, block_here: int) -> tuple[int, int]:
    """The half-open range of visible elements, by the definition in unbounded integers."""
    first_position = call.start + call.seqlen_there - call.seqlen_here
    valid = min(block_here, call.seqlen_here - call.start)
    lo = max(first_position - call.before, 0)
    hi = min(first_position + valid + call.after, call.seqlen_there)
    return (lo, hi) if valid > 0 and lo < hi else (0, 0)


@pytest.mark.parametrize("longest", [40, 1000, MAX_SEQLEN])
@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16), (128, 128)])
def test_no_negative_value_is_divided_and_all_fit_32_bits(longest, here, there):
    calls = drawn_calls(300, longest, here)
    assert any(call.start + call.seqlen_there < call.seqlen_here for call in calls)
    for call in calls:
        lo, _, _, hi = on_the_host(call, here, there)
        seen = elements_seen(call, here)
        want = (seen[0] // there, -(-seen[1] // there)) if any(seen) else (lo, lo)
        assert (lo, hi) == want, call


@pytest.mark.parametrize("divide", [operator.floordiv, operator.mod])
def test_the_kernels_int_refuses_what_the_host_would_floor(divide):
    assert operator.index(divide(KernelInt(7), 4)) == divide(7, 4)
    with pytest.raises(ArithmeticError, match="truncates in a kernel"):
        divide(KernelInt(3) - 4, 4)


@triton.jit
def ranges_kernel(calls, results, BLOCK_HERE: tl.constexpr, BLOCK_THERE: tl.constexpr):
    call = calls + tl.program_id(0) * 5
    lo, full_lo, full_hi, hi = visible_tiles(
        tl.load(call),
        tl.load(call + 1),
        tl.load(call + 2),
        tl.load(call + 3),
        tl.load(call + 4),
        BLOCK_HERE,
        BLOCK_THERE,
    )
    result = results + tl.program_id(0) * 4
    tl.store(result, lo)
    tl.store(result + 1, full_lo)
    tl.store(result + 2, full_hi)
    tl.store(result + 3, hi)


@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16), (32, 32), (3, 5)])
def test_a_kernel_finds_the_tiles_that_the_host_finds(here, there, device):
    calls = drawn_calls(100, 300, here)
    assert any(call.seqlen_here > call.seqlen_there for call in calls)
    results = torch.full((len(calls), 4), -1, dtype=torch.int32, device=device)
    arguments = torch.tensor(calls, dtype=torch.int32, device=device)
    ranges_kernel[(len(calls),)](arguments, results, BLOCK_HERE=here, BLOCK_THERE=there)
    want = [on_the_host(call, here, there) for call in calls]
    assert results.tolist() == want


@triton.jit
def order_kernel(
    calls, edges, full, MOST: tl.constexpr, BLOCK_HERE: tl.constexpr, BLOCK_THERE: tl.constexpr
):
    """Writes tiles in the order in which the backward kernels visit them: edges, then full."""
    call = calls + tl.program_id(0) * 5
    tiles = visible_tiles(
        tl.load(call),
        tl.load(call + 1),
        tl.load(call + 2),
        tl.load(call + 3),
        tl.load(call + 4),
        BLOCK_HERE,
        BLOCK_THERE,
    )
    for i in range(0, tile_count(tiles, True)):
        tl.store(edges + tl.program_id(0) * MOST + i, nth_tile(i, tiles, True))
    for i in range(0, tile_count(tiles, False)):
        tl.store(full + tl.program_id(0) * MOST + i, nth_tile(i, tiles, False))


@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16)])
def test_the_backward_kernels_visit_each_edge_and_each_full_tile_once(here, there, device):
    calls = drawn_calls(100, 300, here)
    most = -(-300 // there) + 1
    visits = torch.full((2, len(calls), most), -1, dtype=torch.int32, device=device)
    arguments = torch.tensor(calls, dtype=torch.int32, device=device)
    order_kernel[(len(calls),)](arguments, *visits, most, BLOCK_HERE=here, BLOCK_THERE=there)
    edges, full = ([[i for i in row if i >= 0] for row in rows] for rows in visits.tolist())
    ranges_of_calls = [on_the_host(call, here, there) for call in calls]
    assert full == [list(range(full_lo, full_hi)) for _, full_lo, full_hi, _ in ranges_of_calls]
    assert edges == [
        [*range(lo, full_lo), *range(full_hi, hi)] for lo, full_lo, full_hi, hi in ranges_of_calls
    ]
    assert any(lo < full_lo < full_hi < hi for lo, full_lo, full_hi, hi in ranges_of_calls)


@pytest.mark.parametrize("together", [1, 2, 5, 12])
@pytest.mark.parametrize("heads", range(1, 8))
@pytest.mark.parametrize("tiles", range(1, 8))
def test_programs_have_all_tiles_of_all_heads_once_and_the_last_heads_their_first_tiles_first(
    tiles, heads, together
):
    found = [tile_of_head.fn(i, tiles, heads, together) for i in range(tiles * heads)]
    assert sorted(found) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    # The fewest heads for this number of programs.
    alone = max(heads - -(-together // tiles), 0)
    assert found[: alone * tiles] == [
        (tile, head) for head in range(alone) for tile in range(tiles)
    ]
    assert found[alone * tiles :] == sorted(found[alone * tiles :])


@pytest.mark.parametrize(("each", "shares"), [(1, 1), (3, 1), (1, 2), (5, 2), (1, 4), (2, 3)])
@pytest.mark.parametrize("tiles", [6, 7, 40])
def test_programs_have_all_shares_of_all_tiles_once_in_order_and_long_ones_first(
    tiles, each, shares
):
    shared = each * (shares - 1)
    found = [share_of.fn(i, tiles, each, shares) for i in range(tiles + shared)]
    of_tiles = {tile: [x[1:] for x in found if x[0] == tile] for tile in range(tiles)}
    assert list(of_tiles) == sorted({tile for tile, *_ in found})
    for tile, parts in of_tiles.items():
        if tile < shared:
            cut = tile // each + 1
            assert parts == [(0, cut), (cut, shares)]
        else:
            assert parts == [(0, shares)]
    # Programs that signal partial sums start first and programs that wait for them start last: no
    # program waits for one that has not started.
    assert all(begin == 0 for _, begin, _ in found[:tiles])
    left = [end - begin for _, begin, end in found[tiles:]]
    assert left == sorted(left, reverse=True)
