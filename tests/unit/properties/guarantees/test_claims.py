"""Guarantees and claims: names, texts, and what is asked by them."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from fa_verify.oracles.guarantee import G3, G8, GUARANTEES, RMS, S1, Guarantee, guarantee_of, named
from fa_verify.properties.guarantees.claims import CLAIMS, checks_of, claims_of, standing_of
from fa_verify.properties.kinds.registry import KINDS


@pytest.mark.parametrize("words", [["S1"], ["merging"], ["S1 merging"]])
def test_a_guarantee_is_named_by_its_key_or_title(words):
    assert named(words) == [S1]


def test_an_unknown_guarantee_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"guarantees has \['G99'\]; needs .* G8 layout, "):
        named(["G1", "G99"])


def test_a_guarantee_is_the_text_that_findings_begin_with():
    assert (G8, RMS) == ("G8 layout", "RMS")
    assert (guarantee_of("G8 layout"), guarantee_of("RMS")) == ("G8", "RMS")
    assert (G3.promise, G8.promise) == ("G10", "G8")


def test_a_guarantee_is_the_same_value_in_another_process():
    again = pickle.loads(pickle.dumps(G3))
    assert again is G3
    assert all(x.statement.endswith(".") for x in GUARANTEES.values())
    assert [*GUARANTEES] == [x.key for x in GUARANTEES.values()]


def test_every_claim_has_a_kind_a_guarantee_and_a_name_of_its_own():
    names = Counter((claim.kind, claim.name) for claim in CLAIMS)
    assert set(names.values()) == {1}
    for claim in CLAIMS:
        assert claim.kind in KINDS
        assert isinstance(claim.guarantee, Guarantee)
        assert not claim.promise or claim.promise in GUARANTEES


def test_every_drawn_test_has_a_name_of_its_own():
    rows = [drawn for claim in CLAIMS for drawn in claim.drawn]
    assert set(Counter((x.test, x.part) for x in rows).values()) == {1}
    assert all(x.words for x in rows)


def test_each_kind_has_a_standing_claim_on_the_bound():
    for kind in KINDS:
        assert [claim.name for claim in standing_of(kind) if claim.bounded]


def test_claims_are_chosen_by_group_and_kind():
    assert [*claims_of("call")][:3] == ["G1", "G2", "G3"]
    assert [*checks_of("statistics")] == ["rms", "bias", "identities"]
    assert {claim.kind for claim in claims_of(kind="cache").values()} == {"cache"}
    assert checks_of("streams")["replayed"] is claims_of("streams")["replayed"].check
