"""A heat map keeps the worst element of every cell and its position."""

from __future__ import annotations

import json

import pytest
import torch

from fa_verify.properties.guarantees.heat_map import MOST, HeatMap


def map_of(badness: torch.Tensor, *index: int) -> HeatMap:
    return HeatMap.of(badness, index, "m", 16, is_ratio=True)


def test_a_small_head_is_kept_as_it_is():
    badness = torch.arange(24.0).view(1, 2, 3, 4) / 7
    found = map_of(badness, 0, 1, 2, 3)
    assert found.head == "b=0 h=1"
    assert (found.rows, found.columns) == (3, 4)
    assert found.values[2][3] == pytest.approx(23 / 7, rel=1e-2)


@pytest.mark.parametrize("place", [(0, 0), (517, 3), (1023, 199)])
def test_no_peak_is_lost_where_cells_are_pooled(place):
    badness = torch.zeros(1, 1, 1024, 200)
    badness[0, 0, place[0], place[1]] = 7.0
    values = map_of(badness, 0, 0, *place).values
    assert len(values) == len(values[0]) == MOST
    assert values[place[0] * MOST // 1024][place[1] * MOST // 200] == 7.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_none_and_the_record_is_json(value):
    badness = torch.ones(1, 1, 300, 2)
    badness[0, 0, 150, 1] = value
    found = map_of(badness, 0, 0, 150, 1).record()
    assert sum(x is None for line in found["values"] for x in line) == 1
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_lse_is_one_column():
    found = map_of(torch.ones(2, 3, 5), 1, 2, 4)
    assert (found.rows, found.columns, found.head) == (5, 1, "b=1 h=2")
