"""Split keys: every guarantee holds for few queries and many keys."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import T3
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import claims_of

CLAIMS = [
    pytest.param(x, id=x.name, marks=pytest.mark.asks(x.guarantee))
    for x in claims_of("call").values()
]
# Enough keys for several tiles in every split; fewer in the interpreter, which is slow.
KEYS = {"cpu": 120, "cuda": 20_000}
# (dtype, rows, mask): splits with many tiles; with one or none, where a window or lengths leave
# few; and empty rows.
FEW = {
    "one row": ("bf16", 1, Mask()),
    "one row, a window": ("fp32", 1, Mask(window_left=9)),
    "rows at the end": ("fp16", 3, Mask(causal=True)),
    "lengths": ("fp16", 2, Mask(seqlens_q=(2, 1), seqlens_k=(40, 7))),
    "no keys": ("fp32", 5, Mask(causal=True, seqlens_q=(5, 4), seqlens_k=(3, 0))),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("few", FEW)
def test_few_rows_against_long_keys_keep_every_guarantee(check_one, subject, device, few, claim):
    dtype, M, mask = FEW[few]
    # A shard has most kernels of these head_dims.
    problem = Problem(
        B=2, H=2, M=M, N=KEYS[device], D=24, Dv=32, mask=mask, dirty="nan", seed=1, device=device,
        dtype="fp64" if claim.guarantee is T3 else dtype, config=a_split_of(subject, few),
    )  # fmt: skip
    check_one(problem, claim.check)


def a_split_of(subject, few: str) -> str:
    """Return a configuration with splits, a different one for each problem."""
    otherwise = subject.numerics.splits
    found = [name for name, x in subject.configs.items() if x.get("splits", otherwise) > 1]
    if not found:
        pytest.skip(f"{subject.name} declares no configuration with splits")
    return found[[*FEW].index(few) % len(found)]
