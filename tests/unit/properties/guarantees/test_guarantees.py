"""Each guarantee's check catches its fault and passes a correct subject."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

CAUSAL = Problem(
    B=2,
    H=4,
    Hk=2,
    M=20,
    N=13,
    D=5,
    Dv=3,
    dtype="fp64",
    dirty="nan",
    mask=Mask(causal=True, seqlens_q=(17, 20), seqlens_k=(13, 9)),
)


def findings(check, fault: str, problem: Problem = CAUSAL):
    trial = run_trial(Subject.of(Eager(fault), "eager"), problem)
    assert trial is not None
    return check(trial)


@pytest.mark.parametrize("name", claims.checks_of("call"))
def test_a_correct_subject_passes(name):
    assert findings(claims.checks_of("call")[name], "") == []


@pytest.mark.parametrize(
    ("fault", "check", "output"),
    [
        ("one element off", claims.accuracy, "out"),
        ("one element off", claims.logic, "out"),
        ("sees one key more", claims.accuracy, "lse"),
        ("lse in base 2", claims.accuracy, "lse"),
        ("NaN in lse", claims.accuracy, "lse"),
        ("NaN in lse", claims.finite, "lse"),
        ("lse of empty rows is 0", claims.empty_rows, "lse"),
        ("dout of empty rows", claims.empty_rows, "dv"),
        ("reads padding", claims.dirty_padding, "out"),
        ("sees one key more", claims.hidden_positions, "out"),
        ("no select on dP", claims.hidden_positions, "dq"),
        ("last row not written", claims.full_overwrite, "out"),
        ("writes past the end", claims.full_overwrite, "out"),
        ("reads past the end", claims.reads_in_bounds, "out"),
        ("v of the first batch entry for all", claims.independence, "out"),
        ("another result every call", claims.repeatable, "out"),
        ("offsets of 32 bits", claims.far_offsets, "out"),
        ("scale of the call before", claims.state, "out"),
    ],
)
def test_a_fault_is_caught_on_its_output(fault, check, output):
    problem = CAUSAL
    if fault == "dout of empty rows":
        problem = Problem(M=6, N=3, dtype="fp64", mask=Mask(causal=True))
    if check is claims.independence:
        problem = dataclasses.replace(CAUSAL, seed=1)  # the second entry is computed alone
    assert output in [finding.output for finding in findings(check, fault, problem)]


def test_a_finding_says_where_what_and_how_to_replay():
    (finding,) = findings(claims.accuracy, "one element off")
    message = str(finding)
    assert "G1 accuracy: out of eager leaves the derived bound" in message
    assert "worst at b=1 h=2 m=19 d=1" in message
    assert re.search(r"got -?\d.*, want -?\d.*, error 1e-11, bound \S+, ratio \d", message)
    assert "1 of 480 elements is bad" in message
    assert "m tile 1 of 2 (width 16), the ragged tail, crossed by the mask's edge" in message
    assert "bad only at b=1, h=2, m=19" in message
    replayed = re.search(r"--fa-replay='(.*)'", message).group(1)
    assert Problem.from_json(replayed) == CAUSAL


@pytest.mark.parametrize(("error", "found"), [(2.0**-1023, []), (2.0**-1021, ["dv"])])
def test_terms_that_underflow_may_lose_all_their_digits(error, found):
    trial = run_trial(Subject.of(Eager(), "eager"), CAUSAL)
    zeros = torch.zeros_like(trial.want.dv)
    trial = dataclasses.replace(
        trial,
        got=trial.got._replace(dv=zeros + error),
        want=trial.want._replace(dv=zeros),
        judgement=dataclasses.replace(
            trial.judgement, terms=trial.judgement.terms._replace(dv=zeros)
        ),
    )
    assert [finding.output for finding in claims.logic(trial)] == found


def test_an_output_of_another_dtype_is_refused():
    class Narrow(Eager):
        def spoil(self, out, lse, live, N, config):
            return out.float(), lse

    with pytest.raises(SubjectError, match=r"out has shape .* and dtype torch.float32; needs"):
        run_trial(Subject.of(Narrow(), "narrow"), CAUSAL)


def test_a_problem_out_of_range_is_not_judged():
    wide = Problem(M=3, N=3, dtype="fp32", sm_scale=1e6)
    assert run_trial(Subject.of(Eager(), "eager"), wide) is None


def test_a_declaration_with_an_unknown_word_is_refused():
    subject = Eager()
    subject.dtypes = ("fp16", "fp12")
    with pytest.raises(ValueError, match=r"eager.dtypes has \['fp12'\]"):
        Subject.of(subject, "eager")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_every_check_keeps_to_the_declared_layouts(layout):
    class Contiguous(Eager):
        layouts = (layout,)

        def __call__(self, *tensors, **rest):
            rows = [x if layout == "bhsd" else x.transpose(1, 2) for x in tensors]
            assert all(x.is_contiguous() for x in rows), [x.stride() for x in rows]
            return super().__call__(*tensors, **rest)

    unchecked = {}
    problem = Problem(
        B=2, H=4, Hk=2, M=5, N=6, D=5, Dv=3, dtype="fp64", layouts=(layout,) * 4, seed=1
    )
    trial = run_trial(Subject.of(Contiguous(), "contiguous"), problem)
    checks = claims.checks_of("call", "closed forms")
    assert claims.in_turn(checks, unchecked)(trial) == []
    gaps = f"contiguous declares layouts=('{layout}',), which have no gaps"
    assert unchecked == {"G12": gaps}
