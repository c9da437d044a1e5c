"""G11: results are within the bound for every tile configuration."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import G11
from fa_verify.properties.guarantees import claims
from fa_verify.shards import Shard

# Tile pairs of a problem in the interpreter, where each split of a tile is a program of its own.
COST_OF_SPLITS = 4


@pytest.mark.asks(G11)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_tile_configuration_is_within_the_bound(for_all, subject, config, dtype, device):
    dtypes = subject.configs[config].get("dtypes", subject.dtypes)
    if dtype not in dtypes:
        dtype = dtypes[0]
    many = subject.configs[config].get("splits", 1) > 8 and device == "cpu"
    limits = {"max_cost": COST_OF_SPLITS} if many else {}
    shard = Shard(dtype, config, (16, 32, 24), 32)
    # Of the kernels of a configuration, which no other test may use, one for a pair of head_dims.
    for_all(claims.accuracy, shard, kernels=1, needs={"layouts": ("bhsd", "bshd"), **limits})
