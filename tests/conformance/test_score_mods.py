"""Score modifications (softcap, ALiBi, bias, sinks): every guarantee holds with them too."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.guarantee import G1, T3
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of, claims_of
from fa_verify.properties.inputs.families import NO_SINKS

CLAIMS = [
    pytest.param(x, id=x.name, marks=pytest.mark.asks(x.guarantee))
    for x in claims_of("call").values()
]
# Several tiles, padding, empty rows, and a tile that the window's edge crosses.
SOME = Problem(
    B=2, H=2, M=19, N=21, D=24, Dv=17, dtype="fp16", dirty="nan", seed=1,
    mask=Mask(window_left=9, window_right=3, seqlens_q=(19, 8), seqlens_k=(12, 21)),
    layouts=("bshd", "padded", "transposed", "bhsd"), config="16x16", softcap=2.0, alibi="normal",
    bias="normal/hmn",
)  # fmt: skip


@pytest.mark.parametrize("sinks", [NO_SINKS, "some_absent"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_modified_scores_keep_every_guarantee(check_one, subject, device, claim, sinks):
    config = SOME.config if SOME.config in subject.configs else next(iter(subject.configs))
    dtype = "fp64" if claim.guarantee is T3 else SOME.dtype
    problem = dataclasses.replace(SOME, config=config, dtype=dtype, device=device, sinks=sinks)
    check_one(problem, claim.check)


@pytest.mark.asks(G1)
@pytest.mark.parametrize(
    ("check", "sinks"), [("G1", NO_SINKS), ("dbias", NO_SINKS), ("dsinks", "some_absent")]
)
def test_modified_scores_have_the_precision_of_fp32(check_one, subject, device, check, sinks):
    # The fp32 shards of the gradients are of TF32, whose bound holds any dot in TF32.
    config = SOME.config if SOME.config in subject.configs else next(iter(subject.configs))
    problem = dataclasses.replace(SOME, config=config, dtype="fp32", device=device, sinks=sinks)
    check_one(problem, checks_of("call", "added")[check])
