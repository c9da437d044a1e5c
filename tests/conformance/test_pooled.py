"""Guarantees of the probabilities pooled over blocks of pairs."""

from __future__ import annotations

import pytest

from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of

# (dtype, seed, batch entries, heads, mask): windows with empty rows, a predicate, and a map of
# blocks. The seeds give small blocks, blocks of several tiles, and a single block.
MASKS = {
    "window": ("fp32", 93, 2, 1, Mask(window_left=20, window_right=3, seqlens_k=(50, 5))),
    "causal": ("fp16", 4, 2, 1, Mask(causal=True, seqlens_q=(20, 9), seqlens_k=(12, 50))),
    "predicate": ("fp64", 36, 1, 2, BlockSparse(side=12, percent=40, seed=19, seqlens_q=(17,))),
    "blocks": ("bf16", 20, 1, 2, BlockSparse(side=32, percent=50, seed=2, window_left=40)),
}


@pytest.fixture(autouse=True)
def pools(subject):
    """Skip subjects without pooled probabilities."""
    if subject.pooled is None:
        pytest.skip(f"{subject.name} declares no pooled")


@pytest.mark.parametrize("mask", MASKS)
def test_pooled_probabilities_keep_every_guarantee(check_one, subject, device, mask):
    dtype, seed, B, H, value = MASKS[mask]
    config = "16x32" if "16x32" in subject.configs else next(iter(subject.configs))
    problem = Problem(
        B=B, H=H, Hk=H, M=20, N=50, D=24, dtype=dtype, mask=value, dirty="nan", seed=seed,
        layouts=("bshd", "padded", "strided", "bhsd"), config=config, device=device,
    )  # fmt: skip
    check_one(problem, every_guarantee)


def every_guarantee(trial):
    """Return the findings of all guarantees of pooled probabilities."""
    return [finding for check in checks_of("pooled").values() for finding in check(trial)]
