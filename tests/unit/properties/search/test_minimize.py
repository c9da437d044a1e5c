"""Minimisation of a failing problem: each step is simpler, and known minima are reached."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kinds.reductions import complexity, reductions
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.search import minimize
from fa_verify.properties.search.minimize import minimized

PLAIN = Problem()
# A problem with every feature, for the search to remove.
LARGE = Problem(
    B=3,
    H=12,
    Hk=3,
    M=61,
    N=67,
    D=33,
    Dv=24,
    dtype="bf16",
    mask=Mask(causal=True, window_left=9, seqlens_q=(61, 7, 30), seqlens_k=(50, 40, 0)),
    sm_scale=0.5,
    layouts=("packed", "strided", "padded", "offset"),
    inputs="needle",
    dout="one_hot",
    dirty="nan",
    config="32x16",
    seed=77,
)


def finding(problem: Problem, guarantee: str = "G1 accuracy") -> Finding:
    return Finding(
        guarantee=guarantee,
        claim="is wrong",
        subject="nobody",
        output="out",
        where="",
        got=math.nan,
        want=math.nan,
        bound=0.0,
        bad=1,
        total=1,
        places="",
        problem=problem,
    )


def simplest_of(fails, start: Problem = LARGE) -> Problem:
    """The problem at which the search ends, from a failing one."""
    assert fails(start)
    found = minimized(start, [finding(start)], lambda p: [finding(p)] if fails(p) else [])
    return found[0].problem


@given(problems())
def test_every_step_is_strictly_simpler(problem):
    # A strict order has no cycles, so every search ends.
    for simpler in reductions(problem):
        assert complexity(simpler) < complexity(problem)


@given(problems(configs=("16x16", "32x16")))
def test_no_step_changes_which_kernel_it_is(problem):
    kept = ("dtype", "config", "device")
    for simpler in reductions(problem):
        assert [getattr(simpler, name) for name in kept] == [
            getattr(problem, name) for name in kept
        ]


@given(problems())
def test_every_step_can_be_replayed(problem):
    for simpler in reductions(problem):
        assert Problem.from_json(simpler.to_json()) == simpler


@given(problems())
def test_an_unconditional_failure_ends_at_the_simplest_problem(problem):
    sizes = {name: min(1, getattr(problem, name)) for name in ("B", "M", "N")}
    want = Problem(dtype=problem.dtype, **sizes)
    assert simplest_of(lambda _: True, problem) == want


def test_the_simplest_problem_has_no_simpler_one():
    assert list(reductions(PLAIN)) == []


MINIMA = {
    "anything": (lambda p: True, {}),
    "keys_past_a_tile_and_causal": (
        lambda p: p.N > 16 and p.mask.causal,
        {"N": 17, "mask": Mask(causal=True)},
    ),
    "more_rows_than_keys": (lambda p: p.M > p.N, {"M": 2}),
    "rows_and_keys_equal": (lambda p: p.M == p.N and p.N > 20, {"M": 21, "N": 21}),
    "lengths_in_multiples": (
        lambda p: p.M % 16 == 0 == p.N % 16 and p.N > 100,
        {"M": 16, "N": 112},
    ),
    "second_entry_padded": (
        lambda p: p.B > 1 and p.mask.seqlens_k is not None and p.mask.seqlens_k[1] < p.N,
        {"B": 2, "mask": Mask(seqlens_k=(1, 0))},
    ),
    "padding_and_a_key": (
        lambda p: any(0 < length < p.N for length in p.mask.seqlens_k or ()),
        {"N": 2, "mask": Mask(seqlens_k=(1,))},
    ),
    "no_keys_in_an_entry": (
        lambda p: 0 in (p.mask.seqlens_k or ()),
        {"mask": Mask(seqlens_k=(0,))},
    ),
    "few_keys_of_many": (
        lambda p: p.N > 60 and any(length < 3 for length in p.mask.seqlens_k or ()),
        {"N": 61, "mask": Mask(seqlens_k=(2,))},
    ),
    "rows_of_padding": (
        lambda p: any(length + 3 < p.M for length in p.mask.seqlens_q or ()),
        {"M": 5, "mask": Mask(seqlens_q=(1,))},
    ),
    "layout_of_v": (
        lambda p: p.layouts[2] == "padded",
        {"layouts": ("bhsd", "bhsd", "padded", "bhsd")},
    ),
    "head_dim_of_v": (lambda p: p.Dv == 24, {"Dv": 24}),
    "several_groups": (lambda p: p.Hk > 1 and p.G > 1, {"H": 4, "Hk": 2}),
    "groups_of_three": (lambda p: p.G >= 3, {"H": 3}),
    "two_heads": (lambda p: p.Hk >= 2, {"H": 2, "Hk": 2}),
    "window": (lambda p: p.mask.window_left is not None, {"mask": Mask(window_left=0)}),
    "inputs": (lambda p: p.inputs == "needle", {"inputs": "needle"}),
    "seed": (lambda p: p.seed == 77, {"seed": 77}),
    "scale": (lambda p: p.sm_scale == 0.5, {"sm_scale": 0.5}),
}
STARTS = {
    "rows_and_keys_equal": {"M": 67, "mask": Mask(causal=True)},
    "lengths_in_multiples": {"M": 64, "N": 192, "mask": Mask(causal=True)},
    "more_rows_than_keys": {"N": 50},
}


@pytest.mark.parametrize("name", MINIMA)
def test_a_known_minimum_is_reached(name):
    fails, want = MINIMA[name]
    start = dataclasses.replace(LARGE, **STARTS.get(name, {}))
    assert simplest_of(fails, start) == Problem(dtype=LARGE.dtype, config=LARGE.config, **want)


def test_a_step_that_shows_another_guarantee_is_not_taken():
    def check(problem: Problem) -> list[Finding]:
        return [finding(problem, "G1 accuracy" if problem.N > 20 else "G2 finite")]

    found = minimized(LARGE, [finding(LARGE)], check)
    assert (found[0].guarantee, found[0].problem.N) == ("G1 accuracy", 21)


def test_the_findings_are_those_of_the_simplest_problem():
    found = minimized(LARGE, [finding(LARGE)], lambda p: [finding(p), finding(p)])
    assert [x.problem.N for x in found] == [1, 1]


def test_findings_stay_where_nothing_simpler_fails():
    first = [finding(LARGE)]
    assert minimized(LARGE, first, lambda _: []) is first


def test_no_problem_is_checked_twice():
    checked = []

    def check(problem: Problem) -> list[Finding]:
        checked.append(problem)
        return [finding(problem)] if problem.N > 20 and problem.H > 2 else []

    minimized(LARGE, [finding(LARGE)], check)
    assert LARGE not in checked
    assert len(checked) == len(set(checked))


def test_the_search_ends_after_twenty_seconds_with_the_simplest_so_far(monkeypatch):
    seconds = itertools.count(100.0)
    monkeypatch.setattr(minimize.time, "process_time", lambda: next(seconds))
    checked = []

    def check(problem: Problem) -> list[Finding]:
        checked.append(problem)
        return [finding(problem)] if problem.M == LARGE.M else []

    found = minimized(LARGE, [finding(LARGE)], check)
    assert 15 <= len(checked) <= 20
    assert complexity(found[0].problem) < complexity(LARGE)
    assert found[0].problem.M == LARGE.M
