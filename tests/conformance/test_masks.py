"""Masks with a predicate: their forms agree, and kernels that evaluate them are accurate.

With --mask, only its class; the other files then run with masks of this class too.
"""

from __future__ import annotations

import shlex

import hypothesis
import pytest

from fa_verify.oracles.masks.codec import SHIPPED, mask_class
from fa_verify.properties.checks import guarantees
from fa_verify.properties.problems.strategies import problems
from fa_verify.session import is_ours, mask_of

COMBINATIONS = ("Both", "Either", "Sliced")
EXAMPLES = [name for name in SHIPPED if name not in COMBINATIONS]


def pytest_generate_tests(metafunc):
    if "masks" in metafunc.fixturenames:
        given = mask_of(metafunc.config)
        found = [mask_class(name) for name in EXAMPLES] if given is None else [given]
        metafunc.parametrize("masks", found, ids=lambda found: found.__name__)


@pytest.mark.parametrize("form", ["definition", "kernel", "block_map", "relation"])
def test_the_forms_of_a_mask_agree(masks, form, device, pytestconfig):
    if not is_ours(pytestconfig):
        pytest.skip("compares the forms in the project's own kernels")
    from fa_verify import mask_forms

    given = pytestconfig.getoption("--mask")
    mask = f"--mask={shlex.quote(given)} " if given else ""
    faults_of = getattr(mask_forms, f"{form}_faults")
    drawn = problems(
        mask=masks, masks=("full", "padding"), max_seqlen=72, max_batch=2, max_heads=2, max_cost=25,
        device=device,
    )  # fmt: skip

    @hypothesis.given(problem=drawn)
    def agree(problem):
        __tracebackhide__ = True
        faults = faults_of(problem)
        assert not faults, f"{faults[0]}\n  replay: pytest {mask}--replay='{problem.to_json()}'"

    agree()


@pytest.mark.shards(0, 15)
def test_a_kernel_that_evaluates_a_mask_is_within_the_bound(for_all, shard, masks):
    for_all(guarantees.accuracy, shard, mask=masks)


@pytest.mark.shards(0, 4, float64=True)
def test_a_kernel_that_evaluates_a_mask_has_the_logic_of_float64(for_all, shard, masks):
    for_all(guarantees.logic, shard, mask=masks, inputs="normal")
