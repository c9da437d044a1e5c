"""Every declared value is drawn, by problems of its own: a draw at random may leave it out."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import G1
from fa_verify.properties.guarantees.claims import accuracy_of_all
from fa_verify.properties.kernels.declared_values import examples
from fa_verify.properties.search.search import attack_one
from fa_verify.properties.search.sizing import sized
from fa_verify.session import device_of, subject_of
from fa_verify.shards import has_table


def pytest_generate_tests(metafunc):
    """Parametrize with the problems; the shards of the project's own kernels have all values."""
    subject, device = subject_of(metafunc.config), device_of(metafunc.config)
    found = [] if has_table(subject) else [*examples(subject, device)]
    names = [f"{i:02}-{x.dtype}-d{x.D}-dv{x.Dv}" for i, x in enumerate(found)]
    metafunc.parametrize("problem", found, ids=names)


@pytest.mark.asks(G1)
def test_every_declared_value_is_drawn(runner, problem):
    __tracebackhide__ = True
    attack_one(runner, accuracy_of_all, sized(runner, problem))
    if runner.refusals:
        pytest.skip(", ".join(runner.refusals))
    if not runner.judged:
        pytest.skip(f"out of range: {problem.to_json()}")
