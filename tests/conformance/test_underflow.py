"""The bound is nearly attained: a correct kernel comes close to it where results underflow.

This test fails if the bound becomes so wide that it misses small faults.
"""

from __future__ import annotations

import hypothesis
import pytest

from fa_verify.oracles.guarantee import ATTAINED
from fa_verify.properties.guarantees import claims
from fa_verify.session import is_ours
from fa_verify.shards import Shard

# With fewer problems than the default profile draws on a CPU, none may come close.
ENOUGH = 6
AT_LEAST = {"out": 0.9, "dq": 0.2, "dk": 0.9, "dv": 0.9}
# Output to the families (inputs, dout) with which it underflows.
UNDERFLOWS = {
    "out": ("subnormal", "normal"),
    "dq": ("tiny_k", "normal"),
    "dk": ("tiny_q", "normal"),
    "dv": ("normal", "subnormal"),
}


@pytest.mark.asks(ATTAINED)
@pytest.mark.parametrize("output", UNDERFLOWS)
def test_fp16_comes_close_to_the_bound_where_it_underflows(for_all, pytestconfig, output):
    if not is_ours(pytestconfig):
        pytest.skip("other kernels may round less than the bound allows")
    drawn = hypothesis.settings().max_examples
    if drawn < ENOUGH:
        pytest.skip(f"{drawn} problems are too few to come close to the bound, needs {ENOUGH}")
    reached = []

    def record(trial):
        reached.extend(part[output] for part in trial.peaks if output in part)
        return claims.accuracy(trial)

    inputs, dout = UNDERFLOWS[output]
    needs = {"inputs": inputs, "dout": dout, "lse_grad": False}
    for_all(record, Shard("fp16", "16x16", (16, 24, 32), 16), needs=needs)
    assert max(reached) >= AT_LEAST[output], f"{max(reached)} is below {AT_LEAST[output]}"
