"""Exact probes: inputs whose outputs say, to the last bit, what was seen and summed."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks.guarantees import COMPANIONS

PROBES = ("mask", "ones", "doubled", "permuted")


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.shards(0, 8)
def test_probes_read_back_what_was_seen_and_summed(for_all, shard, probe):
    # Padding may hold anything; a probe replaces the rest.
    for_all(COMPANIONS[probe], shard, runs=2, inputs="normal", dout="normal")
