"""The numbers of the worked element on the page of the error bound are those of the suite."""

from __future__ import annotations

import pytest
import torch

from docs import worked_element
from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.outputs import Numerics
from fa_verify.properties.inputs.tensors import make


def judged(numerics):
    problem = worked_element.PROBLEM
    return judge(
        *make(problem)[:4], mask=problem.mask, sm_scale=problem.scale, in_dtype=problem.dtype,
        numerics=numerics,
    ).bound  # fmt: skip


@pytest.fixture(scope="module")
def bound():
    return judged(worked_element.NUMERICS)


def test_the_terms_of_a_score_add_up_to_its_error():
    error = worked_element.row().forward.scores.error[0, 0, worked_element.KEY]
    assert sum(worked_element.score_terms().values()) == pytest.approx(float(error), rel=1e-12)


def test_the_terms_of_out_add_up_to_its_bound(bound):
    element = float(bound.out[0, 0, 0, worked_element.COLUMN])
    assert sum(worked_element.out_terms().values()) == pytest.approx(element, rel=1e-12)


def test_the_terms_of_lse_add_up_to_its_bound(bound):
    element = float(bound.lse[0, 0, 0])
    assert sum(worked_element.lse_terms().values()) == pytest.approx(element, rel=1e-12)


def test_the_bounds_whose_sources_are_told_apart_are_those_of_the_suite(bound):
    found = worked_element.bounds(worked_element.row().c)
    for one, whole in zip(found, bound, strict=True):
        torch.testing.assert_close(one.flatten(), whole.flatten(), rtol=0, atol=0)


def test_the_sentences_beside_the_tables_hold(bound):
    out, lse = sum(worked_element.out_terms().values()), sum(worked_element.lse_terms().values())
    in_bf16 = ("cast of P", "stored result")
    rest = (x for name, x in worked_element.out_terms().items() if not name.startswith(in_bf16))
    assert f"{100 * sum(rest) / out:.1f}" == "0.7"
    assert f"{out / lse:.0f}" == "126"
    assert f"{100 * worked_element.row().forward.scores.error[0, 0, 0].expm1():.3f}" == "0.002"
    without_cast = judged(Numerics(p_dtype="fp32")).out[0, 0, 0, worked_element.COLUMN]
    assert round(float(bound.out[0, 0, 0, worked_element.COLUMN] / without_cast)) == 7
