"""Every claim about attention to padded tensors, on the problems that its rows say.

The rows are those of ``properties/guarantees/claims.py``.
"""

from __future__ import annotations

import contextlib

import pytest

from fa_verify.conformance.conftest import selected_shards
from fa_verify.properties.guarantees.claims import CLAIMS
from fa_verify.session import mask_of, subject_of
from fa_verify.shards import larger_shards_of
from fa_verify.simulator.interpreter.dot_order import dots_in_order


def pytest_generate_tests(metafunc):
    """Parametrize with the rows of each claim and their shards."""
    config = metafunc.config
    found = []
    for claim in CLAIMS:
        for drawn in claim.drawn:
            if mask_of(config) is not None and not drawn.masked:
                continue
            shards = larger_shards_of(subject_of(config))
            if not drawn.larger:
                shards = selected_shards(config, *drawn.shards, float64=drawn.float64)
            asks = pytest.mark.asks(claim.guarantee)
            name = f"{claim.name}-{drawn.words}"
            found += [
                pytest.param(claim, drawn, x, id=f"{name}-{drawn.of(x)}", marks=asks)
                for x in shards
            ]
    metafunc.parametrize(("claim", "drawn", "shard"), found)


def test_claim(for_all, subject, claim, drawn, shard):
    __tracebackhide__ = True
    if claim.group == "pooled" and subject.pooled is None:
        pytest.skip(f"{subject.name} declares no pooled")
    if claim.promise and not subject.promises(claim.promise, shard.config):
        pytest.skip(f"{subject.name} does not declare the same bits that {claim.guarantee} asks")
    if claim.group == "refused" and not subject.refuses:
        pytest.skip(f"{subject.name} declares no refuses")
    # Products of the interpreter's dots are then added in one order, as tensor cores do.
    with dots_in_order() if claim.group == "parts" else contextlib.nullcontext():
        for_all(claim.check, shard, drawn)
