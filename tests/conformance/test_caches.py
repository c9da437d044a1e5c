"""C1 to C5, G1, G5, I1 and I3: attention over caches, contiguous and in pages, with appends.

For subjects that declare ``kvcache``. ``properties/guarantees/caches.py`` holds the checks.
"""

from __future__ import annotations

import pytest

from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.guarantees.claims import CLAIMS
from fa_verify.simulator.interpreter.dot_order import dots_in_order

CASES = [
    pytest.param(claim, id=claim.name, marks=pytest.mark.asks(claim.guarantee))
    for claim in CLAIMS
    # An append writes on every call, and "append" asks where there is one.
    if claim.kind == "cache" and claim.name != "written"
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("claim", CASES)
def test_attention_over_a_cache_keeps_every_guarantee(for_claim, subject, claim, dtype):
    __tracebackhide__ = True
    if claim.group == "refused" and not subject.refuses:
        pytest.skip(f"{subject.name} declares no refuses")
    # In the interpreter, a product's bits else depend on its row in the tile.
    with dots_in_order():
        # All checks of a dtype share their kernels.
        for_claim(claim, dtype, f"caches of {dtype}")
