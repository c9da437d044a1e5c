"""G6: any set of the gradients is what all of them together are."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.guarantee import G6
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.inputs.dlse_families import NO_DLSE


@pytest.mark.asks(G6)
@pytest.mark.shards(3, 4)
def test_any_set_of_gradients_is_what_all_of_them_are(check_one, subject, device, shard):
    check_one(of_sets(subject, shard.dtype, shard.config, shard.head_dims[0], device), sets)


# Configurations of two passes and of one, for the gradient of a bias beside a block mask.
@pytest.mark.asks(G6)
@pytest.mark.parametrize("passes", ["two", "one"])
def test_any_set_of_gradients_with_that_of_a_bias(check_one, subject, device, passes):
    config = "16x16-one_pass" if passes == "one" else "16x16"
    if config not in subject.configs:
        config = [*subject.configs][-1 if passes == "one" else 0]
    problem = of_sets(subject, subject.dtypes[0], config, min(subject.head_dims or (16,)), device)
    mask = BlockSparse(side=16, percent=60, seed=2) if "custom" in subject.masks else Mask()
    check_one(dataclasses.replace(problem, bias="normal/hmn", mask=mask), sets)


def sets(trial):
    """Return the findings on any set of gradients, and on the accuracy of all of them."""
    return claims.accuracy(trial) or claims.gradient_sets(trial)


def of_sets(subject, dtype, config, D, device):
    """Return a problem of two tiles both ways, of one batch entry and a group of two heads."""
    size = subject.seqlen_multiple
    return Problem(
        H=2 if subject.gqa else 1, M=size * (20 // size + 1), N=size * (20 // size + 1), D=D, Dv=D,
        dtype=dtype, config=config, device=device, seed=5,
        dlse="normal" if subject.lse_grad else NO_DLSE,
    )  # fmt: skip
