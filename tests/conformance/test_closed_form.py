"""Closed forms: inputs whose outputs say, to the last bit, what was seen and summed."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks.guarantees import CLOSED_FORM

NAMES = ("mask", "ones", "doubled", "permuted")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.shards(0, 8)
def test_closed_forms_read_back_what_was_seen_and_summed(for_all, shard, name):
    # Padding may hold anything; the check replaces the rest.
    for_all(CLOSED_FORM[name], shard, runs=2, inputs="normal", dout="normal")
