"""G11: results are within the bound for every tile configuration."""

from __future__ import annotations

import pytest

from fa_verify.properties.checks import guarantees
from fa_verify.shards import Shard


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_tile_configuration_is_within_the_bound(for_all, subject, config, dtype):
    dtypes = subject.configs[config].get("dtypes", subject.dtypes)
    if dtype not in dtypes:
        dtype = dtypes[0]
    for_all(guarantees.accuracy, Shard(dtype, config, (16, 32, 24), 32), layouts=("bhsd", "bshd"))
