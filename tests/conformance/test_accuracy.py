"""G1: accuracy of every element on problems that no draw has often enough."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import G1
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.kernels.fitting import fitted

# Batch entries, heads and rows that have all finite numbers of fp16 between them, and fewer for
# kernels that take longer.
EVERY_NUMBER, SOME_NUMBERS = (8, 4, 1984), (1, 2, 128)
# Configurations that other tests compile for small head dims.
CONFIGS = {"fp16": "16x16", "bf16": "32x16", "fp32": "16x16"}


# Drawn problems of larger head dims are few. Ordinary data show roundings in 16 bits best, and
# scores far from 0 the roundings of their dots.
@pytest.mark.asks(G1)
@pytest.mark.parametrize("family", ["normal", "lse_low_130"])
def test_larger_head_dims_are_accurate_on_these_families(check_one, larger, device, family):
    D, Dv = larger.head_dims
    problem = Problem(
        H=2, M=40, N=70, D=D, Dv=Dv, dtype=larger.dtype, inputs=family, config=larger.config,
        seed=1, device=device,
    )  # fmt: skip
    check_one(problem, claims.accuracy)


@pytest.mark.asks(G1)
@pytest.mark.parametrize("splits", [False, True], ids=["", "splits"])
@pytest.mark.parametrize("seed", [0, 1])
def test_keys_of_tiny_weight_are_not_skipped(check_one, subject, device, seed, splits):
    dtype = next((x for x in ("fp32", "bf16") if x in subject.dtypes), subject.dtypes[0])
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    if splits:
        found = [name for name, words in subject.configs.items() if words.get("splits", 1) > 1]
        if not found:
            pytest.skip(f"{subject.name} declares no configuration with splits")
        config = found[0]
    D, size = min(subject.head_dims or (16,)), subject.seqlen_multiple
    # The lighter keys fill several tiles of the largest width.
    size *= -(-(100 if config.startswith("16x16") else 400) // size)
    problem = Problem(
        M=size, N=size, D=D, Dv=D, dtype=dtype, inputs="values_of_light_keys", config=config,
        seed=seed, device=device,
    )  # fmt: skip
    check_one(problem, claims.accuracy)


@pytest.mark.asks(G1)
@pytest.mark.parametrize("dtype", CONFIGS)
def test_scores_of_every_exponent_are_exponentiated(check_one, subject, device, is_fast, dtype):
    if dtype not in subject.dtypes or not (subject.m_ne_n and subject.m_gt_n):
        pytest.skip(f"{subject.name} takes no {dtype} with more rows than keys")
    B, H, M = EVERY_NUMBER if is_fast else SOME_NUMBERS
    problem = Problem(
        B=B, H=H, Hk=H, M=M, N=2, D=1, Dv=1, dtype=dtype, sm_scale=1.0, inputs="swept_scores",
        seed=1, config=CONFIGS[dtype],
    )  # fmt: skip
    fitting = fitted(subject, problem, device)
    if fitting is None:
        pytest.skip(f"{subject.name} excludes such problems")
    check_one(fitting, claims.accuracy)
