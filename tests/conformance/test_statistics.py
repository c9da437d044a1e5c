"""RMS, bias and the identities, which detect faults that are too small for the bound."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import RMS
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import identities, statistics

# Enough rows for a sharp threshold.
LENGTH = {"cpu": 192, "cuda": 2048}
# Problems whose errors are pooled, and the rows of each.
POOLED = {"cpu": (4, 256), "cuda": (16, 2048)}
LONG = 2000


def as_by_independent_roundings(trial):
    """Return the findings of RMS, bias and the identities."""
    return [*statistics.rms(trial), *statistics.bias(trial), *identities.identities(trial)]


@pytest.mark.asks(RMS)
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_errors_of_many_rows_are_those_of_independent_roundings(check_one, device, dtype, mask):
    size = LENGTH[device]
    problem = Problem(H=2, Hk=2, M=size, N=size, D=64, Dv=64, dtype=dtype, mask=mask, device=device)
    check_one(problem, as_by_independent_roundings)


@pytest.mark.asks(RMS)
def test_errors_of_long_rows_are_those_of_independent_roundings_over_many_problems(
    check_one, device, is_fast
):
    if not is_fast:
        pytest.skip("takes minutes on a CPU")
    count, rows = POOLED[device]
    problem = Problem(
        B=count, M=rows, N=LONG, D=64, Dv=64, dtype="bf16", seeds=tuple(range(1, count + 1)),
        device=device,
    )  # fmt: skip
    check_one(problem, as_by_independent_roundings)
