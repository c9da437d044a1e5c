"""Two runs agree bitwise if that is promised, and otherwise within the bound; NaN never agrees."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.agreement import OF_KEYS, OF_ROWS, agree, exact, within
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

PROBLEM = Problem(B=2, H=4, Hk=2, M=6, N=5, D=3, Dv=7, dtype="fp32", mask=Mask(causal=True))
# The index of an element that is not 0 in any output.
AT = {"out": (1, 2, 3, 4), "lse": (1, 2, 3), "dq": (1, 2, 3, 2), "dk": (1, 1, 1, 2)}
AT["dv"] = AT["dk"]


@lru_cache(maxsize=2)
def tried(promised: bool) -> AttentionTrial:
    subject = Eager()
    subject.bitwise = ("G4", "G8", "G10") if promised else ()
    trial = run_trial(Subject.of(subject, "eager"), PROBLEM)
    assert trial is not None
    return trial


def changed(trial: AttentionTrial, name: str, value) -> Outputs[torch.Tensor | None]:
    """The outputs of a trial with another value of one element of one output."""
    other = getattr(trial.got, name).clone()
    other[AT[name]] = value(other[AT[name]]) if callable(value) else value
    return trial.got._replace(**{name: other})


def next_number(x: torch.Tensor) -> torch.Tensor:
    return x.nextafter(torch.tensor(math.inf))


def found_in(findings) -> list[str]:
    return [finding.output for finding in findings]


@pytest.mark.parametrize("promised", [True, False])
def test_a_run_agrees_with_itself(promised):
    trial = tried(promised)
    assert agree(trial, trial.got, "G8 layout", "differs") == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_bit_breaks_a_promise(name):
    trial = tried(True)
    found = agree(trial, changed(trial, name, next_number), "G8 layout", "differs")
    assert found_in(found) == [name]
    assert (found[0].guarantee, found[0].claim) == ("G8 layout", "differs")
    assert (found[0].bad, found[0].total) == (1, getattr(trial.got, name).numel())


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_bit_is_within_the_bound_where_nothing_is_promised(name):
    trial = tried(False)
    assert agree(trial, changed(trial, name, next_number), "G8 layout", "differs") == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_value_outside_the_bound_is_found_without_a_promise(name):
    trial = tried(False)
    bound, want = (getattr(x, name)[AT[name]] for x in (trial.judgement.bound, trial.want))
    inside, outside = (
        agree(trial, changed(trial, name, want + share * bound), "G8 layout", "differs")
        for share in (0.5, 2.0)
    )
    assert found_in(inside) == []
    assert found_in(outside) == [name]
    assert outside[0].claim == "differs, and leaves the bound"
    assert outside[0].bound == bound


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("first", [math.nan, 1e6], ids=str)
def test_an_error_of_the_first_run_is_not_a_finding_on_the_second(first, name):
    trial = tried(False)
    wrong = changed(trial, name, first)
    was_wrong = dataclasses.replace(trial, got=wrong)
    assert agree(was_wrong, wrong, "G13 state", "differs") == []
    # All other elements exceed the bound in the second run; this one did in the first.
    worse = torch.full_like(getattr(wrong, name), math.nan)
    found = agree(was_wrong, wrong._replace(**{name: worse}), "G13 state", "differs")
    assert [(x.output, x.bad, x.total) for x in found] == [(name, *2 * [worse.numel() - 1])]
    found = agree(was_wrong, trial.got, "G13 state", "differs")
    assert [(x.output, x.bad, x.got) for x in found] == [
        (name, 1, pytest.approx(first, nan_ok=True))
    ]


def test_outputs_summed_by_atomics_are_compared_with_the_bound_and_others_bitwise():
    trial = tried(True)
    subject = dataclasses.replace(trial.subject, configs={"default": {"atomic": ("dq",)}})
    trial = dataclasses.replace(trial, subject=subject)
    for other in OUTPUTS:
        found = agree(trial, changed(trial, other, next_number), "G10 repeatable", "differs")
        assert found_in(found) == [other] * (other != "dq")
    found = agree(trial, changed(trial, "dq", math.nan), "G10 repeatable", "differs")
    assert [(x.output, x.claim) for x in found] == [("dq", "differs, and leaves the bound")]


@pytest.mark.parametrize(
    ("guarantee", "promises"),
    [("G3", "G10"), ("G4", "G4"), ("G7", "G10"), ("G8", "G8"), ("G12", "G8"), ("G13", "G10")],
)
def test_a_guarantee_is_as_sharp_as_the_promise_that_it_follows_from(guarantee, promises):
    trial = tried(True)
    again = changed(trial, "out", next_number)
    subject = dataclasses.replace(trial.subject, bitwise=(promises,))
    rest = tuple(x for x in ("G4", "G5", "G8", "G9", "G10") if x != promises)
    assert agree(dataclasses.replace(trial, subject=subject), again, f"{guarantee} x", "") != []
    subject = dataclasses.replace(trial.subject, bitwise=rest)
    assert agree(dataclasses.replace(trial, subject=subject), again, f"{guarantee} x", "") == []


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("promised", [True, False])
def test_nan_and_infinity_never_agree_with_a_number(promised, value, name):
    trial = tried(promised)
    found = agree(trial, changed(trial, name, value), "G8 layout", "differs")
    assert found_in(found) == [name]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_number_never_agrees_with_nan_to_the_bit(name):
    trial = tried(True)
    was_nan = dataclasses.replace(trial, got=changed(trial, name, math.nan))
    assert found_in(agree(was_nan, trial.got, "G8 layout", "differs")) == [name]


def test_nan_is_outside_every_limit():
    trial = tried(False)
    endless = Outputs(*(torch.full_like(x, math.inf) for x in trial.judgement.bound))
    nans = Outputs(*(torch.full_like(x, math.nan) for x in trial.got))
    assert found_in(within(trial, nans, endless, "G1", "")) == list(OUTPUTS)


def test_where_both_are_nan_bits_agree():
    trial = tried(True)
    nan = changed(trial, "out", math.nan)
    assert agree(dataclasses.replace(trial, got=nan), nan, "G8 layout", "differs") == []


def test_a_zero_agrees_with_a_negative_zero():
    trial = tried(True)
    first, second = (changed(trial, "dq", zero) for zero in (0.0, -0.0))
    assert agree(dataclasses.replace(trial, got=first), second, "G8 layout", "differs") == []


def all_but(axes: tuple[int, ...], where: tuple[int, ...]) -> torch.Tensor:
    """A bool tensor that is True except in one place."""
    everywhere = torch.ones(axes, dtype=torch.bool)
    everywhere[where] = False
    return everywhere


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("promised", [True, False])
def test_rows_restrict_what_belongs_to_rows(promised, name):
    trial = tried(promised)
    again = changed(trial, name, 99.0)
    rows, others = all_but((2, 4, 6), (1, 2, 3)), all_but((2, 4, 6), (1, 3, 2))
    assert agree(trial, again, "G8 layout", "", rows=rows) == []
    (found,) = agree(trial, again, "G8 layout", "", rows=others)
    columns = 1 if name == "lse" else getattr(trial.got, name).shape[3]
    assert (found.bad, found.total) == (1, columns * (2 * 4 * 6 - 1))


@pytest.mark.parametrize("name", OF_KEYS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("promised", [True, False])
def test_keys_restrict_what_belongs_to_keys(promised, heads, name):
    trial = tried(promised)
    again = changed(trial, name, 99.0)
    keys, others = all_but((2, heads, 5), (1, heads - 1, 1)), all_but((2, heads, 5), (1, 0, 2))
    assert agree(trial, again, "G8 layout", "", keys=keys) == []
    (found,) = agree(trial, again, "G8 layout", "", keys=others)
    assert found.output == name
    hidden = getattr(trial.got, name).shape[3] * 2 // heads
    assert (found.bad, found.total) == (1, getattr(trial.got, name).numel() - hidden)


@pytest.mark.parametrize("promised", [True, False])
def test_rows_do_not_restrict_keys_nor_keys_rows(promised):
    trial = tried(promised)
    nothing = {"rows": torch.zeros(2, 4, 6).bool(), "keys": torch.zeros(2, 1, 5).bool()}
    again = Outputs(*(x + 99 for x in trial.got))
    for name, kept in (("rows", OF_KEYS), ("keys", OF_ROWS)):
        found = agree(trial, again, "G8 layout", "", **{name: nothing[name]})
        assert found_in(found) == list(kept)


@pytest.mark.parametrize("promised", [True, False])
def test_only_the_outputs_asked_for_are_compared(promised):
    trial = tried(promised)
    again = Outputs(*(x + 99 for x in trial.got))
    assert found_in(agree(trial, again, "G8 layout", "", only=OF_KEYS)) == list(OF_KEYS)


@pytest.mark.parametrize("promised", [True, False])
def test_where_nothing_is_to_be_compared_nothing_is_found(promised):
    trial = tried(promised)
    again = Outputs(*(x + 99 for x in trial.got))
    assert agree(trial, again, "G8 layout", "", only=()) == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("promised", [True, False])
def test_outputs_that_there_are_not_are_passed_over(promised, first):
    trial = tried(promised)
    again = trial.got._replace(out=trial.got.out + 99, lse=None, dq=None, dk=None, dv=None)
    if first:
        trial = dataclasses.replace(trial, got=again._replace(out=trial.got.out))
    assert found_in(agree(trial, again, "G8 layout", "")) == ["out"]


def test_what_the_first_run_lacks_is_passed_over_to_the_bit():
    trial = tried(True)
    fewer = dataclasses.replace(trial, got=trial.got._replace(lse=None))
    assert agree(fewer, trial.got, "G8 layout", "") == []


@pytest.mark.parametrize("promised", [True, False])
def test_the_worst_of_the_compared_elements_is_shown(promised):
    trial = tried(promised)
    out = trial.got.out.clone()
    out[0, 0, 0, 0], out[1, 1, 1, 1], out[1, 3, 5, 6] = 1e6, 50.0, 60.0
    rows = all_but((2, 4, 6), (0, 0, 0))
    (found,) = agree(trial, trial.got._replace(out=out), "G8 layout", "", rows=rows)
    assert (found.where, found.got, found.bad) == ("b=1 h=3 m=5 d=6", 60.0, 2)


@pytest.mark.parametrize("promised", [True, False])
def test_nan_is_worse_than_any_number(promised):
    trial = tried(promised)
    out = trial.got.out.clone()
    out[0, 0, 3, 0], out[1, 3, 5, 6] = 1e6, math.nan
    (found,) = agree(trial, trial.got._replace(out=out), "G8 layout", "")
    assert (found.where, found.bad) == ("b=1 h=3 m=5 d=6", 2)


def test_exact_looks_only_where_it_is_told_to():
    trial = tried(False)
    got, want = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    shaped = (got.view(1, 1, 1, 2), want.view(1, 1, 1, 2))
    for where, bad in (([True, False], 0), ([False, True], 1), ([True, True], 1)):
        compared = torch.tensor(where).view(1, 1, 1, 2)
        assert len(exact(trial, "out", *shaped, compared, "G3", "")) == bad
