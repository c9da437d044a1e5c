"""G3, G4, G5: empty rows, dirty padding, hidden positions."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees


@pytest.mark.shards(1, 3)
def test_empty_rows_give_zero_output_and_take_no_part(for_all, shard):
    for_all(guarantees.empty_rows, shard, runs=2, empty_rows=True)


@pytest.mark.parametrize("dirty", ["nan", "inf", "max", "noise"])
@pytest.mark.shards(2, 5)
def test_dirty_padding_changes_nothing_and_gets_zero_gradients(for_all, shard, dirty):
    for_all(guarantees.dirty_padding, shard, runs=2, padding=True, dirty=dirty)


@pytest.mark.parametrize("tensor", ["q", "k", "v", "dout"])
@pytest.mark.shards(1, 9)
def test_dirty_padding_of_one_tensor_changes_nothing(for_all, shard, tensor):
    for_all(guarantees.dirty_padding, shard, runs=2, padding=True, dirty=f"nan_{tensor}")


@pytest.mark.shards(0, 2)
def test_hidden_positions_add_exactly_nothing(for_all, shard):
    for_all(guarantees.hidden_positions, shard, runs=3, hidden=True)
