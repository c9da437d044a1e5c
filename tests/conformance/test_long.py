"""Long sequences, judged in chunks of rows: 65,536 on a GPU, shorter ones on a CPU."""

from __future__ import annotations

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks import guarantees
from fa_verify.properties.checks.guarantees import CLOSED_FORM

LENGTH = {"cpu": 700, "cuda": 65_536}
# Beyond some 5,000 keys the bound on lse misses a key too many or too few.
COUNTED = {"cpu": 8_192, "cuda": 65_536}


@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(window_left=300)], ids=["causal", "window"]
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_long_sequences_lie_within_the_derived_bound(check_one, subject, device, dtype, mask):
    N = LENGTH[device]
    M = N - 3 if subject.m_ne_n and subject.causal_alignment == "bottom-right" else N
    M, N = (x // subject.seqlen_multiple * subject.seqlen_multiple for x in (M, N))
    problem = Problem(M=M, N=N, D=64, Dv=64, dtype=dtype, mask=mask, seed=1, device=device)
    check_one(problem, guarantees.accuracy)


def test_long_rows_count_their_keys(check_one, device):
    N = COUNTED[device]
    problem = Problem(M=64, N=N, dtype="fp16", mask=Mask(causal=True), seed=1, device=device)
    check_one(problem, CLOSED_FORM["counts"])
