"""Packed sequences whose tiles are enumerated in one grid axis, and the choice to do so."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from fa_kernels.configs import CONFIGS
from fa_kernels.kernels.common.seqlen_info import sequence_of_tile
from fa_kernels.launch.sizes import Sizes
from fa_kernels.validation.arguments import Arguments

BLOCK = 16


@triton.jit
def found_kernel(found_ptr, offsets_ptr, entries, rows, BLOCK: tl.constexpr):
    """Writes (b, tile) of each program."""
    b, tile = sequence_of_tile(tl.program_id(0), offsets_ptr, entries, rows, BLOCK)
    tl.store(found_ptr + 2 * tl.program_id(0), b)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, tile)


def found(offsets: list[int], rows: int, places: int, device: str) -> list[tuple[int, int]]:
    given = torch.tensor(offsets, dtype=torch.int32, device=device)
    out = torch.empty(places, 2, dtype=torch.int32, device=device)
    found_kernel[(places,)](out, given, len(offsets) - 1, rows, BLOCK=BLOCK)
    return [tuple(x) for x in out.tolist()]


def with_lengths(*lengths: int, first: int = 0) -> list[int]:
    return torch.tensor([first, *lengths]).cumsum(0).tolist()


DRAWN = [
    torch.randint(0, 50, (B,), generator=torch.Generator().manual_seed(B)).tolist()
    for B in range(2, 12)
]


@pytest.mark.parametrize("first", [0, 5, 40])
@pytest.mark.parametrize(
    "lengths",
    [[1], [0], [16], [17], [0, 0, 0], [15, 1, 16, 1], [33, 0, 0, 100, 1], *DRAWN],
    ids=str,
)
def test_each_tile_of_each_sequence_has_one_place_and_nothing_else_has_rows(lengths, first, device):
    offsets = with_lengths(*lengths, first=first)
    places = offsets[-1] // BLOCK + len(lengths)
    # Programs past the last tile have no rows either.
    at = found(offsets, offsets[-1] + 3, places + 4, device)
    with_rows = [(b, tile) for b, tile in at[:places] if tile * BLOCK < lengths[b]]
    wanted = [(b, tile) for b, n in enumerate(lengths) for tile in range(-(-n // BLOCK))]
    assert with_rows == wanted
    assert all(tile * BLOCK >= lengths[b] for b, tile in at[places:])
    assert all(tile >= 0 for _, tile in at)


@pytest.mark.parametrize(
    "offsets", [[0, 60, 17, 62], [-5, 17, 200], [2**30, -(2**30), 7, 62], [-(2**31), 7, 62]]
)
def test_wild_offsets_give_sequences_that_there_are_and_tiles_whose_rows_can_be_counted(
    offsets, device
):
    places = 62 // BLOCK + len(offsets)
    at = found(offsets, 62, places, device)
    assert all(0 <= b < len(offsets) - 1 and 0 <= tile <= places for b, tile in at)


def sizes(lengths: list[int], *, known: bool, longest: bool) -> Sizes:
    """Sizes of packed queries and as many keys; the host has their lengths, or the longest."""
    rows = sum(lengths)
    most = max(lengths) if known or longest else rows
    x = torch.empty(1, 3, rows, 8)
    places = torch.tensor(with_lengths(*lengths), dtype=torch.int32)
    arguments = Arguments(
        places, places, 0, 0, 1.0, CONFIGS["16x16"], longest=(most, most), ends=(rows, rows)
    )
    return Sizes.of(x, x[:, :1], x[:, :1], arguments)


def test_tiles_are_enumerated_in_one_axis_if_that_takes_fewer_programs():
    uneven = [500, *[3] * 31]
    for known, longest in ((True, True), (False, True), (False, False)):
        of = sizes(uneven, known=known, longest=longest)
        row = sum(uneven) // BLOCK + 32
        assert of.query_tiles(BLOCK) == (row, 32, 3 * row)
        assert of.key_tiles(BLOCK) == (row, 32, row)
    alike = [40] * 5
    of = sizes(alike, known=True, longest=True)
    assert of.query_tiles(BLOCK) == (3, 0, 3 * 5 * 3)
    # Each sequence has at least as many programs as tiles.
    for a, b in pairwise(with_lengths(*uneven)):
        assert (b // BLOCK) - (a // BLOCK) + 1 >= -(-(b - a) // BLOCK)
