"""C1 to C5 and I1 to I3: attention over caches, contiguous and in pages, with appends.

For subjects that declare ``kvcache``. ``properties/checks/caches.py`` holds the checks.
"""

from __future__ import annotations

import hypothesis
import pytest

from fa_verify.conformance.conftest import seed_of_kernels
from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.subjects.supported_caches import cached
from fa_verify.simulator.interpreter.dot_order import dots_in_order


def configs_of(subject, dtype) -> tuple[str, ...]:
    """Names of a few configurations without splits that take a dtype."""
    of_dtype = [
        name
        for name, declared in subject.configs.items()
        if dtype in declared.get("dtypes", subject.dtypes)
    ]
    small = [name for name in ("16x16", "16x32", "32x16", "16x16-tf32") if name in of_dtype]
    return tuple(small or of_dtype[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CACHES)
def test_attention_over_a_cache_keeps_every_guarantee(subject, device, check, dtype):
    if subject.kvcache is None:
        pytest.skip(f"{subject.name} declares no kvcache")
    if dtype not in subject.dtypes:
        pytest.skip(f"{subject.name} declares dtypes={subject.dtypes}")
    judged, refused = [], []
    # All checks of a dtype share their kernels.
    kernels = seed_of_kernels(device, f"caches of {dtype}")

    @hypothesis.settings()
    @hypothesis.given(cached(subject, dtype, device, configs_of(subject, dtype), kernels))
    def holds(problem) -> None:
        __tracebackhide__ = True
        try:
            # In the interpreter, a product's bits else depend on its row in the tile.
            with dots_in_order():
                findings = found_in_cache(subject, problem, CACHES[check])
        except NotImplementedError as reason:
            refused.append(str(reason))
            return
        judged.append(problem)
        if findings:
            pytest.fail("\n".join(map(str, findings)), pytrace=False)

    holds()
    if not judged:
        pytest.skip(f"{subject.name} refused every problem: {refused[:1]}")
