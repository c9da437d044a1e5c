"""The code of docs/adding.md does what the page says."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fa_verify import verification, verify
from fa_verify.oracles import guarantee
from fa_verify.oracles.call import changed
from fa_verify.oracles.calls import codec
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.inputs import families, sampling
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds import registry
from fa_verify.properties.kinds.feature import phrase
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import run_trial
from fa_verify.properties.search.causes import Known
from fa_verify.properties.search.failure import Failure
from fa_verify.properties.search.search import Runner
from tests.unit.properties.kernels.broken_subjects import Eager

PAGE = Path(__file__).parents[3] / "docs" / "adding.md"


@pytest.fixture
def code_of(tmp_path, monkeypatch) -> Callable[[str], ModuleType]:
    """The code of a section, as a module. Its guarantees are forgotten after the test."""
    monkeypatch.setattr(guarantee, "GUARANTEES", guarantee.GUARANTEES | {})

    def imported(section: str) -> ModuleType:
        _, _, text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
        blocks = re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
        file = tmp_path / "of_the_page.py"
        file.write_text("\n".join(blocks), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return imported


FIELDS = {"B": 2, "H": 4, "Hk": 2, "M": 7, "N": 9, "D": 4, "Dv": 4, "dtype": "fp32", "dirty": "nan"}
MASK = Mask(causal=True, seqlens_k=(9, 5))


class Doubled(Eager):
    """Gives twice the right out."""

    def __call__(self, *args, **options):
        out, lse = super().__call__(*args, **options)
        return 2 * out, lse


def test_the_mask_of_the_page_sees_what_it_says(code_of):
    mask = code_of("A mask").EveryNth(step=3)
    seen = [[mask.is_visible(0, 0, m, n, M=5, N=5) for n in range(5)] for m in range(5)]
    assert seen == [[n <= m and (m - n) % 3 == 0 for n in range(5)] for m in range(5)]
    assert mask.dense(1, 1, 5, 5)[0, 0].tolist() == seen


def test_the_family_of_the_page_makes_problems(code_of, monkeypatch):
    family = code_of("An input family").alternating_signs
    monkeypatch.setitem(families.INPUTS, "alternating_signs", family)
    problem = Problem(**FIELDS, mask=MASK, inputs="alternating_signs")
    plain = sampling.drawn_normal(problem, "k")
    assert torch.equal(family(problem).k[..., 1::2, :], -plain[..., 1::2, :])
    trial = run_trial(Subject.of(Eager(), "eager"), problem)
    assert trial is not None
    assert checks_of("call")["G1"](trial) == []


@pytest.mark.parametrize(("subject", "count"), [(Eager(), 0), (Doubled(), 1)])
def test_the_guarantee_of_the_page_holds_of_a_right_subject_alone(code_of, subject, count):
    # One key is visible: out is v, and twice that is out of its range.
    problem = Problem(**(FIELDS | {"N": 1}), mask=Mask())
    trial = run_trial(Subject.of(subject, "eager"), problem)
    assert trial is not None
    assert len(code_of("A guarantee").convex(trial)) == count


def test_the_claim_of_the_page_is_asked_by_each_of_its_names(code_of, monkeypatch):
    page = code_of("A guarantee")
    monkeypatch.setattr(verification, "CLAIMS", (*verification.CLAIMS, page.CLAIM))
    eager = dataclasses.replace(Subject.of(Eager(), "eager"), dtypes=("fp64",))
    for name in ("convex", "combination", "convex combination"):
        report = verify(eager, guarantees=[name], problems=2)
        assert report, str(report)
        assert report.unchecked == {}
    doubled = dataclasses.replace(eager, call=Doubled())
    finding, *others = verify(doubled, guarantees=["convex"], problems=20).findings
    # Problems of declared values that no draw had are judged by their accuracy.
    assert {x.guarantee for x in others} <= {"G1 accuracy"}
    assert str(finding).startswith("convex combination: out of eager leaves the range of v\n")


class WrongTwice(Eager):
    """Gives twice the right out in calls of two queries."""

    def __call__(self, q, *others, **options):
        out, lse = super().__call__(q, *others, **options)
        return out * (1 + (q.shape[2] == 2)), lse


@pytest.fixture
def chunks(code_of, monkeypatch) -> ModuleType:
    """The kind of the page, entered where the page says."""
    page = code_of("A kind of call")
    monkeypatch.setitem(codec._OF_KEY, "chunked", page.ChunkedProblem)
    monkeypatch.setitem(registry.KINDS, "chunked", page.CHUNKED)
    every = (*verification.CLAIMS, page.CLAIM)
    monkeypatch.setattr(verification, "CLAIMS", every)
    monkeypatch.setattr(claims, "CLAIMS", every)
    monkeypatch.setattr(verification, "kinds_of", lambda subject: ("chunked",))
    claims.standing_of.cache_clear()
    yield page
    claims.standing_of.cache_clear()


def test_a_call_of_the_page_goes_to_json_and_back(chunks):
    call = chunks.ChunkedProblem(attention=Problem(M=7, dtype="fp64"), rows=3)
    assert call.to_json() == '{"version":1,"M":7,"dtype":"fp64","chunked":{"rows":3}}'
    assert codec.call_from_json(call.to_json()) == call
    with pytest.raises(ValueError, match="no mask"):
        changed(call, mask=Mask(causal=True))


def test_the_kind_of_the_page_is_verified_minimised_and_explained(chunks):
    eager = dataclasses.replace(Subject.of(Eager(), "eager"), dtypes=("fp64",))
    report = verify(eager, problems=6)
    assert report, str(report)
    assert report.unchecked == {}
    wrong = dataclasses.replace(eager, call=WrongTwice())
    (finding,) = verify(wrong, problems=20).findings
    assert finding.guarantee == "G1 accuracy"
    # Two queries, in one call.
    assert finding.problem.to_json() == '{"version":1,"M":2,"dtype":"fp64","chunked":{"rows":2}}'
    known = Known()
    Failure(Runner(wrong, Tally()), chunks.accuracy, [finding], known).causes()
    (cause,) = known.known()
    assert [phrase(x) for x in cause.features] == ["rows > 1", "M > 1"]
    assert not all(chunks.CHUNKED.holds(x, cause.passing) for x in cause.features)


def test_a_simpler_call_of_the_page_has_a_lower_complexity(chunks):
    kind = chunks.CHUNKED
    call = chunks.ChunkedProblem(attention=Problem(B=2, M=7, N=5, dtype="fp64", seed=3), rows=3)
    assert all(kind.complexity(x) < kind.complexity(call) for x in kind.reductions(call))
    for feature in kind.features(call):
        assert kind.holds(feature, call)
        assert not any(kind.holds(feature, x) for x in kind.without(feature, call))
