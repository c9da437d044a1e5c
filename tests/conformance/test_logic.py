"""T3: the kernels in float64, where only errors of logic are larger than roundings."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees


@pytest.mark.parametrize("family", ["normal", "outliers", "needle_visible", "needle_hidden"])
@pytest.mark.shards(float64=True)
def test_float64_agrees_with_the_oracle_to_rounding(for_all, shard, family):
    for_all(guarantees.logic, shard, inputs=family)


@pytest.mark.shards(float64=True)
def test_float64_lies_within_its_bound_for_every_family(for_all, shard):
    for_all(guarantees.accuracy, shard)
