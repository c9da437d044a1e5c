"""G11: every tile configuration is within the bound."""

from __future__ import annotations

import pytest

from fa_kernels import CONFIGS
from properties import guarantees
from tests.conformance.shards import Shard


@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_tile_configuration_is_within_the_bound(for_all, config, dtype):
    if "tf32" in config:
        dtype = "fp32"
    for_all(guarantees.accuracy, Shard(dtype, config, (16, 32, 24), 32), layouts=("bhsd", "bshd"))
