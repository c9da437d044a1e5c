"""Calls in which the values that a kernel declares occur together.

Problems have every three values of shape and mask, and every two others. Calls with a cache and
merges have every two values. A third of the calls are made in another way, too: they have every two
values of a way and a size, a mask or a dtype.
"""

from __future__ import annotations

import pytest

from fa_verify.breadth import combinations_of
from fa_verify.properties.guarantees.added_gradients import bias_gradient, sink_gradient
from fa_verify.properties.guarantees.claims import CLAIMS, accuracy_of_all, in_turn
from fa_verify.properties.guarantees.ways import one_way
from fa_verify.properties.kinds.registry import kinds_of
from fa_verify.properties.search.search import attack_one
from fa_verify.session import mask_of

# Gradients of a bias and of sinks are sums over all that share them.
_ADDED = {"dbias": bias_gradient, "dsinks": sink_gradient}
# The bound stands on every call beside these.
WAYS = {
    "attention": in_turn({"way": one_way, **_ADDED}, {}), "cache": one_way, "merge": one_way,
}  # fmt: skip
# The tests that share the calls of a kind.
PARTS = {"attention": 16, "cache": 3, "merge": 2}
CASES = [
    pytest.param(claim, part, id=f"{claim.kind}-{part}", marks=pytest.mark.asks(claim.guarantee))
    for claim in CLAIMS
    if claim.bounded and claim.kind in PARTS
    for part in range(PARTS[claim.kind])
]


@pytest.mark.parametrize(("claim", "part"), CASES)
def test_every_combination_lies_within_the_derived_bound(runner, tally, pytestconfig, claim, part):
    __tracebackhide__ = True
    mask, subject, kind = mask_of(pytestconfig), runner.subject, claim.kind
    if kind not in kinds_of(subject):
        pytest.skip(f"{subject.name} takes no {kind}")
    if mask is not None and (
        kind != "attention" or "custom" not in subject.masks or subject.always_causal
    ):
        pytest.skip(f"{subject.name} takes no {kind} with masks of a class")
    array = combinations_of(pytestconfig, kind)
    calls = array.calls
    check = accuracy_of_all if kind == "attention" else claim.check
    numbers = range(part, len(calls), PARTS[kind])
    if not numbers:
        pytest.skip(f"{len(calls)} calls have all combinations")
    for number in numbers:
        judged = runner.judged
        attack_one(runner, WAYS[kind] if number in array.asks else check, calls[number])
        if runner.judged > judged:
            tally.combined.setdefault(kind, set()).add(number)
    if not runner.judged:
        pytest.skip(", ".join(runner.refusals) or "all calls are out of range")
