"""G6 and G7: writes and reads stay within the tensors, and every output is written."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees

SURROUNDED = ("padded", "strided", "packed", "bshd")


@pytest.mark.shards(0, 3)
def test_every_element_is_written_and_nothing_outside(for_all, shard):
    for_all(guarantees.full_overwrite, shard, runs=2)


@pytest.mark.shards(2, 3)
def test_nothing_outside_the_tensors_elements_is_read(for_all, shard):
    for_all(guarantees.reads_in_bounds, shard, runs=2, layouts=SURROUNDED)
