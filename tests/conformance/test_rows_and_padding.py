"""G3, G4, G5: empty rows, dirty padding, hidden positions."""

from __future__ import annotations

import pytest

from properties import guarantees
from tests.conformance.shards import SHARDS


@pytest.mark.parametrize("shard", SHARDS[1::3], ids=str)
def test_empty_rows_give_zero_output_and_take_no_part(for_all, shard):
    for_all(guarantees.empty_rows, shard, empty_rows=True)


@pytest.mark.parametrize("dirty", ["nan", "inf", "max", "noise"])
@pytest.mark.parametrize("shard", SHARDS[2::5], ids=str)
def test_dirty_padding_changes_no_bit_and_gets_zero_gradients(for_all, shard, dirty):
    for_all(guarantees.dirty_padding, shard, padding=True, dirty=dirty)


@pytest.mark.parametrize("shard", SHARDS[::2], ids=str)
def test_hidden_positions_add_exactly_nothing(for_all, shard):
    for_all(guarantees.hidden_positions, shard, hidden=True)
