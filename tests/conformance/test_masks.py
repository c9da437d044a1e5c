"""Masks with a predicate: their forms agree, and kernels that evaluate them are accurate.

With --fa-mask, only its class; the other files then run with masks of this class too.
"""

from __future__ import annotations

import random

import hypothesis
import pytest

from fa_verify.oracles.guarantee import FORMS, G1, T3
from fa_verify.oracles.masks.codec import SHIPPED, mask_class
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import claims_of
from fa_verify.properties.running.replay_line import replay_line
from fa_verify.pytest_plugin.environment import ON_GPU
from fa_verify.session import is_ours, mask_of
from fa_verify.simulator.interpreter.dot_order import dots_in_order

COMBINATIONS = ("Both", "Either", "Sliced")
EXAMPLES = [name for name in SHIPPED if name not in COMBINATIONS]
# One that is aligned with the last key, and one that depends on the head.
ON_CACHES = ["PrefixLM", "BlockSparse"]


def pytest_generate_tests(metafunc):
    for fixture, names in (("masks", EXAMPLES), ("masks_on_caches", ON_CACHES)):
        if fixture in metafunc.fixturenames:
            given = mask_of(metafunc.config)
            found = [mask_class(name) for name in names] if given is None else [given]
            metafunc.parametrize(fixture, found, ids=lambda found: found.__name__)
    if "form" in metafunc.fixturenames:
        # The masks of the repository compile in its own tests, and on a GPU the kernel does.
        alone = mask_of(metafunc.config) is not None and not ON_GPU
        forms = ["definition", "kernel", *(["compiled"] if alone else []), "block_map", "relation"]
        metafunc.parametrize("form", forms)


@pytest.mark.asks(FORMS)
def test_the_forms_of_a_mask_agree(masks, form, pytestconfig):
    """The tests of a run start with this one, so that no kernel is blamed for its mask."""
    given = pytestconfig.getoption("--fa-mask")
    if not is_ours(pytestconfig):
        if given is None or form == "block_map":
            pytest.skip("compares the forms in the project's own kernels")
        pytest.importorskip("triton", reason="the jit form of a mask needs Triton")
    from fa_verify.mask_compilation import compilation_fault
    from fa_verify.mask_forms import first_disagreement

    settings = hypothesis.settings()
    rng = random.Random(f"{masks.__name__}, {form}" if settings.derandomize else None)
    try:
        if form == "compiled":
            refused = compilation_fault(given, masks, rng)
            if refused is not None:
                pytest.fail(str(refused), pytrace=False)
            return
        found = first_disagreement(form, masks, "cuda" if ON_GPU else "cpu", rng)
    except NotImplementedError as reason:
        if is_ours(pytestconfig):
            raise
        pytest.skip(f"{masks.__name__} has no jit form: {reason}")
    if found is not None:
        replay = replay_line(found.problem.to_json(), mask=given or "")
        pytest.fail(f"{found}\n  replay: {replay}", pytrace=False)


@pytest.mark.asks(G1)
@pytest.mark.shards(0, 15)
def test_a_kernel_that_evaluates_a_mask_is_within_the_bound(for_all, shard, masks):
    # Each mask compiles kernels of its own.
    for_all(claims.accuracy, shard, kernels=2, needs={"mask": masks})


@pytest.mark.asks(T3)
@pytest.mark.shards(0, 4, float64=True)
def test_a_kernel_that_evaluates_a_mask_has_the_logic_of_float64(for_all, shard, masks):
    for_all(claims.logic, shard, needs={"mask": masks, "inputs": "normal"})


@pytest.mark.parametrize("check", ["accuracy", "free rows"])
def test_a_mask_on_a_cache_keeps_guarantees(for_claim, check, masks_on_caches):
    __tracebackhide__ = True
    with dots_in_order():
        for_claim(claims_of(kind="cache")[check], "fp32", "caches of fp32", mask=masks_on_caches)
