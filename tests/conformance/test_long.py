"""Long sequences, judged in chunks: 65,536 on a GPU, what the interpreter can do on a CPU."""

from __future__ import annotations

import pytest

from oracles.mask import Mask
from oracles.problem import Problem
from properties import guarantees
from properties.compare import Violation

LENGTH = {"cpu": 700, "cuda": 65_536}


@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(window_left=300)], ids=["causal", "window"]
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_long_sequences_lie_within_the_derived_bound(findings_of, device, dtype, mask):
    length = LENGTH[device]
    problem = Problem(
        M=length - 3, N=length, D=64, Dv=64, dtype=dtype, mask=mask, seed=1, device=device
    )
    findings = findings_of(problem, guarantees.accuracy)
    if findings:
        raise Violation(findings)
