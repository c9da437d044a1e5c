"""The strategies of merges and rings."""

from __future__ import annotations

import hypothesis

from fa_verify.oracles.calls.merge import LSE_FAMILIES, STATE_LAYOUTS
from fa_verify.properties.problems.merges import merges, rings
from tests.unit.properties.problems.sampling import drawn


def test_merges_are_drawn_with_empty_parts_in_every_storage():
    found = drawn(merges("bf16", "cpu"), 400)
    assert {x.dtype for x in found} == {"bf16"}
    assert any(0 in x.parts and any(x.parts) for x in found)
    assert {len(x.parts) for x in found} >= {0, 1, 2, 3}
    assert {x.layout for x in found} == set(STATE_LAYOUTS)
    assert {x.lse for x in found} == set(LSE_FAMILIES)
    assert all(x.B * x.H * x.M <= 120 for x in found)


def test_a_merge_shrinks_to_few_parts_in_plain_storage():
    smallest = hypothesis.find(merges("fp16", "cpu"), lambda x: sum(x.parts) > 2 and x.M > 1)
    assert smallest.parts in ((7,), (2, 1), (1, 2), (1, 1, 1))
    assert smallest.M == 2
    assert (smallest.B, smallest.H, smallest.Dv, smallest.hidden) == (1, 1, 1, 0)
    assert (smallest.lse, smallest.out, smallest.layout) == ("normal", "normal", "parts")


def test_rings_have_as_many_keys_as_their_parts():
    found = drawn(rings("fp32", "cpu", "16x16"), 100)
    assert all(x.attention.N == sum(x.lengths) for x in found)
    assert any(0 in x.lengths for x in found)
    assert {x.attention.mask.causal for x in found} == {False, True}
    assert {x.attention.G for x in found} == {1, 2, 3}
