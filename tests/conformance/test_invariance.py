"""G8, G9, G10 and G13: results do not depend on strides, neighbours, repetition or history."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees


@pytest.mark.shards(1, 2)
def test_any_strides_give_what_contiguous_copies_give(for_all, shard):
    for_all(guarantees.layout, shard, runs=4)


@pytest.mark.shards(0, 3)
def test_batch_entries_and_heads_do_not_influence_each_other(for_all, shard):
    # Lengths of one tile leave the limit on cost to batch entries and heads.
    for_all(guarantees.independence, shard, max_seqlen=shard.tile)


@pytest.mark.shards(2, 4)
def test_the_same_inputs_give_the_same_bits_run_after_run(for_all, shard):
    for_all(guarantees.repeatable, shard, runs=4)


@pytest.mark.shards(3, 6)
def test_calls_of_other_shapes_in_between_change_nothing(for_all, shard):
    # The calls of another dtype in between compile kernels of their own.
    for_all(guarantees.state, shard, runs=17, kernels=2)
