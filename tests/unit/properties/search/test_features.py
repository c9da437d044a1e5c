"""Features of problems, and the problems without them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kinds.feature import Feature, phrase
from fa_verify.properties.kinds.features import features_of, holds, without
from fa_verify.properties.problems.strategies import problems


@given(problems())
def test_a_problem_without_a_feature_lacks_it(problem):
    for feature in features_of(problem):
        assert holds(feature, problem)
        assert phrase(feature)
        found = [*without(feature, problem, ("default", "other"))]
        assert found, feature
        assert not any(holds(feature, x) for x in found)


@given(problems())
def test_features_are_plain_data(problem):
    for name, value in json.loads(json.dumps(features_of(problem))):
        feature = Feature(name, tuple(value) if isinstance(value, list) else value)
        assert feature in features_of(problem)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (Feature("dtype", ("fp16", "bf16")), "inputs in fp16, bf16"),
        (Feature("config", ("split3",)), "the configuration split3"),
        (Feature("N above", 64), "N > 64"),
        (Feature("H is 1"), "H = 1"),
        (Feature("N is no multiple of 16"), "N not a multiple of 16"),
        (Feature("layout of q"), "q not contiguous"),
        (Feature("empty rows"), "rows that see no key"),
        (Feature("M > N"), "M > N"),
    ],
)
def test_a_feature_is_described_in_a_few_words(feature, words):
    assert phrase(feature) == words


def test_rows_that_see_no_key_are_a_feature_whatever_hides_the_keys():
    for problem in (
        Problem(M=2, N=1, mask=Mask(causal=True)),
        Problem(M=2, N=3, mask=Mask(seqlens_k=(0,))),
        Problem(M=5, N=2, mask=Mask(window_right=1)),
        Problem(M=2, N=0),
    ):
        assert Feature("empty rows") in features_of(problem)
    assert Feature("empty rows") not in features_of(Problem(M=3, N=3, mask=Mask(causal=True)))
