"""C1 to C5 and I1 to I3: attention over caches, contiguous and in pages, with appends.

For subjects that declare ``kvcache``. ``properties/checks/caches.py`` holds the checks.
"""

from __future__ import annotations

import pytest

from fa_verify.conformance.drawn_calls import holds_for_drawn
from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.checks.caches import CACHES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CACHES)
def test_attention_over_a_cache_keeps_every_guarantee(subject, device, check, dtype):
    holds_for_drawn(subject, device, check, dtype)
