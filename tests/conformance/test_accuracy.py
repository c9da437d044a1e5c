"""G1 and G2: accuracy of every element, and no NaN or Inf; for single and batched problems."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees


def test_every_element_lies_within_the_derived_bound(for_all, shard):
    for_all(guarantees.accuracy, shard)


@pytest.mark.shards(0, 3)
def test_batched_problems_lie_within_the_derived_bound(for_all, shard):
    for_all(guarantees.accuracy, shard, batched=True)


def test_larger_head_dims_lie_within_the_derived_bound(for_all, larger):
    for_all(guarantees.accuracy, larger)


@pytest.mark.parametrize(
    "family",
    [
        "lse_low_90",
        "lse_low_130",
        "lse_low_6e3",
        "lse_high_6e4",
        "lse_low_1e5",
        "lse_high_1e5",
    ],
)
@pytest.mark.shards(0, 6)
def test_outputs_are_finite_however_far_the_logits_are_shifted(for_all, shard, family):
    for_all(guarantees.finite, shard, inputs=family)
