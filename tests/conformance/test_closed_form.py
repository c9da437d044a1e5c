"""Closed forms: inputs whose exact outputs show which keys were visible and summed."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks.guarantees import CLOSED_FORM

NAMES = ("mask", "ones", "doubled", "permuted")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.shards(0, 8)
def test_closed_form_outputs_show_what_was_seen_and_summed(for_all, shard, name):
    # The check replaces all values outside of padding.
    for_all(CLOSED_FORM[name], shard, runs=2, inputs="normal", dout="normal")
