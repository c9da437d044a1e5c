"""Problems in which every three values of shape and mask occur together, and every two others."""

from __future__ import annotations

import pytest

from fa_verify.breadth import combinations_of
from fa_verify.oracles.guarantee import G1
from fa_verify.properties.checks.claims import accuracy
from fa_verify.properties.search.search import attack_one
from fa_verify.session import mask_of

PARTS = 16


@pytest.mark.asks(G1)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_combination_lies_within_the_derived_bound(runner, tally, pytestconfig, part):
    __tracebackhide__ = True
    mask, subject = mask_of(pytestconfig), runner.subject
    if mask is not None and ("custom" not in subject.masks or subject.always_causal):
        pytest.skip(f"{subject.name} takes no masks of a class")
    problems = combinations_of(pytestconfig).problems
    numbers = range(part, len(problems), PARTS)
    if not numbers:
        pytest.skip(f"{len(problems)} problems have all combinations")
    for number in numbers:
        judged = runner.judged
        attack_one(runner, accuracy, problems[number])
        if runner.judged > judged:
            tally.combined.add(number)
    if not runner.judged:
        pytest.skip(", ".join(runner.refusals) or "all problems are out of range")
