"""S1 and S2: merged attention states, and a ring over parts of the keys.

For subjects that declare ``states``. ``properties/guarantees/merging.py`` holds the checks.
"""

from __future__ import annotations

import pytest

from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.guarantees.claims import CLAIMS

CASES = [
    pytest.param(claim, id=claim.name, marks=pytest.mark.asks(claim.guarantee))
    for claim in CLAIMS
    if claim.kind in ("merge", "ring")
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("claim", CASES)
def test_merged_states_keep_every_guarantee(for_claim, claim, dtype):
    __tracebackhide__ = True
    for_claim(claim, dtype, "")
