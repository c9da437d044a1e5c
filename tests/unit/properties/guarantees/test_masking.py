"""G3, G4 and G5: elements that must be exact, and extreme values at hidden positions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import masking
from fa_verify.properties.guarantees.agreement import OF_ROWS
from fa_verify.properties.guarantees.masking import dirty_padding, empty_rows, hidden_positions
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_subject, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

# Row 0 of entry 0 sees no key; rows 6 and 7 of entry 0 and key 4 of entry 1 are padding.
PROBLEM = Problem(
    B=2, H=4, Hk=2, M=8, N=5, D=3, Dv=7, dtype="fp64", dirty="nan",
    mask=Mask(causal=True, seqlens_q=(6, 4), seqlens_k=(5, 4)),
)  # fmt: skip
TENSORS = ("q", "k", "v", "dout")


def tried(problem: Problem = PROBLEM) -> AttentionTrial:
    trial = run_trial(Subject.of(Eager(), "eager"), problem)
    assert trial is not None
    return trial


def with_one_element(
    trial: AttentionTrial, name: str, at: tuple[int, ...], value: float
) -> AttentionTrial:
    """The trial with another value of one element, in the last column."""
    other = getattr(trial.got, name).clone()
    other[at if name == "lse" else (*at, -1)] = value
    return dataclasses.replace(trial, got=trial.got._replace(**{name: other}))


def recorded(check, trial: AttentionTrial, monkeypatch) -> list:
    """The inputs of every further run of a check."""
    seen = []

    def record(subject, problem, inputs):
        seen.append(inputs)
        return run_subject(subject, problem, inputs)

    monkeypatch.setattr(masking, "run_subject", record)
    assert check(trial) == []
    return seen


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("at", [(0, 3, 0), (0, 3, 6), (1, 0, 7)], ids=str)
@pytest.mark.parametrize("value", [1e-300, math.nan], ids=str)
def test_an_empty_row_is_exact_in_every_output(name, at, value):
    spoilt = with_one_element(tried(), name, at, value)
    found = [x for x in empty_rows(spoilt) if "not exact" in x.claim]
    assert [(x.output, x.bad) for x in found] == [(name, 1)]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("value", [1e-300, math.nan], ids=str)
def test_padding_is_exact_in_every_output(name, value):
    at = (0, 3, 6) if name in OF_ROWS else (1, 1, 4)
    spoilt = with_one_element(tried(), name, at, value)
    found = [x for x in dirty_padding(spoilt) if "not exact" in x.claim]
    assert [(x.output, x.bad) for x in found] == [(name, 1)]


@pytest.mark.parametrize("name", OUTPUTS)
def test_valid_elements_need_not_be_exact(name):
    at = (0, 3, 5) if name in OF_ROWS else (1, 1, 3)
    spoilt = with_one_element(tried(), name, at, 99.0)
    assert [x for x in empty_rows(spoilt) + dirty_padding(spoilt) if "not exact" in x.claim] == []


def test_dout_of_empty_rows_alone_is_poisoned(monkeypatch):
    trial = tried(dataclasses.replace(PROBLEM, dirty="zero"))
    (again,) = recorded(empty_rows, trial, monkeypatch)
    live = PROBLEM.mask.dense(2, 4, 8, 5).expand(2, 4, 8, 5).any(3)
    assert torch.equal(again.dout.isnan().all(3), ~live)
    assert torch.equal(again.dout[live], trial.inputs.dout[live])
    assert all(getattr(again, x) is getattr(trial.inputs, x) for x in ("q", "k", "v"))


def test_dirty_padding_is_compared_with_clean_padding(monkeypatch):
    (again,) = recorded(dirty_padding, tried(), monkeypatch)
    assert all(map(torch.equal, again, make(PROBLEM, dirty="zero").tensors))


@pytest.mark.parametrize("seed", range(6))
def test_hidden_positions_makes_a_hidden_key_and_a_hidden_row_extreme(seed, monkeypatch):
    problem = dataclasses.replace(PROBLEM, dirty="zero", seed=seed)
    trial = tried(problem)
    seen = problem.mask.dense(2, 4, 8, 5)
    keys, rows = recorded(hidden_positions, trial, monkeypatch)
    largest = torch.finfo(torch.float64).max
    for again, changed, hides in (
        (keys, "kv", ~seen[:, 0].all(1)),
        (rows, "q dout" if seed % 2 else "dout", ~seen[:, 0].all(2)),
    ):
        for name, before, after in zip(TENSORS, trial.inputs.tensors, again.tensors, strict=True):
            extreme = (after.abs() == largest).all((1, 3))
            if name not in changed:
                assert after is before
                continue
            assert extreme.sum(1).tolist() == [1, 1]
            assert hides[extreme].all()
            kept = ~extreme[:, None, :, None].expand(before.shape)
            assert torch.equal(after[kept], before[kept])
            assert after[~kept].unique().tolist() == [-largest, largest]


@pytest.mark.parametrize("seed", range(6))
def test_a_key_and_a_row_are_taken_that_hide_where_there_are_any(seed, monkeypatch):
    # Every row sees keys 0 to 2; the last row sees all keys.
    trial = tried(Problem(B=2, M=3, N=5, dtype="fp64", mask=Mask(causal=True), seed=seed))
    keys, rows = recorded(hidden_positions, trial, monkeypatch)
    largest = torch.finfo(torch.float64).max
    assert not (keys.k[:, :, :3].abs() == largest).any()
    assert not (rows.dout[:, :, 2].abs() == largest).any()


@pytest.mark.parametrize("seed", range(6))
def test_a_row_and_a_key_that_see_something_too_come_before_those_that_see_nothing(
    seed, monkeypatch
):
    # Rows 0 to 4 see no key; row 5 sees one, row 6 both. Both keys see rows, key 0 both.
    trial = tried(Problem(M=7, N=2, dtype="fp64", mask=Mask(causal=True), seed=seed))
    _, rows = recorded(hidden_positions, trial, monkeypatch)
    extreme = (rows.dout.abs() == torch.finfo(torch.float64).max).all((1, 3))
    assert extreme.nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("name", OUTPUTS)
def test_only_elements_that_do_not_see_extreme_values_must_stay(name, monkeypatch):
    # Every output changes everywhere; elements that see the extreme key or row do not count.
    trial = tried()
    changed = trial.got._replace(**{name: getattr(trial.got, name) + 99})
    runs = []

    def record(subject, problem, inputs):
        runs.append(inputs)
        return changed

    monkeypatch.setattr(masking, "run_subject", record)
    (found,) = hidden_positions(trial)
    assert found.output == name
    seen = PROBLEM.mask.dense(2, 4, 8, 5)[:, 0]
    if name in OF_ROWS:
        extreme = (runs[0].k.abs() == torch.finfo(torch.float64).max).all((1, 3))
        blind = ~(seen & extreme[:, None, :]).any(2)
        heads = 4
    else:
        extreme = (runs[1].dout.abs() == torch.finfo(torch.float64).max).all((1, 3))
        blind = ~(seen & extreme[:, :, None]).any(1)
        heads = 2
    columns = {"out": 7, "lse": 1, "dq": 3, "dk": 3, "dv": 7}[name]
    assert 0 < found.total == int(blind.sum()) * heads * columns
