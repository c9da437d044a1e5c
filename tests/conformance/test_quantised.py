"""G1, G16 and Q1: attention to codes of 8 bits with scales.

For subjects that declare ``quantised``. ``properties/guarantees/quantised.py`` holds the checks.
"""

from __future__ import annotations

import pytest

from fa_verify.oracles.calls.quantised import QUANTISED_DTYPES
from fa_verify.properties.guarantees.claims import CLAIMS

CASES = [
    pytest.param(claim, id=claim.name, marks=pytest.mark.asks(claim.guarantee))
    for claim in CLAIMS
    if claim.kind == "quantised"
]


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
@pytest.mark.parametrize("claim", CASES)
def test_attention_to_codes_keeps_every_guarantee(for_claim, claim, dtype):
    __tracebackhide__ = True
    for_claim(claim, dtype, f"codes with out of {dtype}")
