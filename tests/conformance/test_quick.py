"""The problems of --fa-quick, each with its checks. Collected with that option only."""

from __future__ import annotations

import pytest

from fa_verify.properties.guarantees.claims import BY_NAME, in_turn
from fa_verify.properties.search.search import attack_one
from fa_verify.properties.search.sizing import sized
from fa_verify.quick import entries_for
from fa_verify.session import device_of, subject_of


def pytest_generate_tests(metafunc):
    """Parametrize with the problems that the subject supports."""
    config = metafunc.config
    found = [*entries_for(subject_of(config), device_of(config))]
    # The number keeps names apart, and its order is that of the kills.
    names = [f"{i:03}-{x.problem.dtype}-{x.problem.config}" for i, x in enumerate(found)]
    metafunc.parametrize("entry", found, ids=names)


def test_a_problem_that_kills_faults_holds(runner, entry):
    unchecked = {}
    problem = sized(runner, entry.problem)
    claim = in_turn({name: BY_NAME[name] for name in entry.checks}, unchecked)
    attack_one(runner, claim, problem)
    if runner.refusals:
        pytest.skip(", ".join(runner.refusals))
    if not runner.judged:
        pytest.skip(f"out of range: {problem.to_json()}")
