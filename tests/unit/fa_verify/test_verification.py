"""verify() returns the verdict of a run."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import fa_verify
from fa_verify import Report, verify
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import claims_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.verification import _asked
from tests.unit.properties.guarantees.test_cache_checks import attend, drops_the_append
from tests.unit.properties.guarantees.test_merging_checks import torch_merge
from tests.unit.properties.kernels.broken_subjects import Eager

SOME = ("G1", "G2", "G6", "G8", "G10")


def eager(fault: str = "") -> Eager:
    subject = Eager(fault)
    subject.dtypes = ("fp64",)
    return subject


def test_a_correct_subject_is_verified_on_drawn_problems():
    report = verify(eager(), problems=3)
    assert report
    assert report.findings == ()
    assert report.judged > 10
    assert "distinct problems judged" in str(report)


def test_the_same_seed_draws_the_same_problems():
    first, second, other = (verify(eager(), problems=3, guarantees=SOME, seed=s) for s in (1, 1, 2))
    assert first.summary == second.summary
    assert first.summary != other.summary


def test_a_wrong_subject_is_reported_with_its_simplest_problem():
    report = verify(eager("out scaled"), problems=3, guarantees=SOME)
    assert not report
    assert report.findings[0].guarantee == "G1 accuracy"
    assert report.findings[0].problem == Problem(dtype="fp64")


def test_dtypes_that_a_failed_guarantee_was_not_tried_in_are_named():
    attention = eager("out scaled")
    attention.dtypes = ("fp32", "fp64")
    report = verify(attention, problems=3, guarantees=("G1",))
    assert report.findings[0].problem.dtype == "fp32"
    assert "\nG1 in fp64 was not checked: it failed in fp32" in str(report)


def test_the_replay_line_of_verify_is_a_call_of_verify():
    attention = eager("out scaled")
    report = verify(attention, problems=3, guarantees=("G1",))
    call, *others = re.findall(r"^  replay: (.*)$", str(report), re.MULTILINE)
    assert {*others} <= {call}
    again = eval(call, {"verify": verify, "Eager": attention, "Problem": Problem})
    assert [x.problem for x in again.findings] == [Problem(dtype="fp64")] * len(again.findings)
    assert not again


def test_given_problems_are_judged_by_every_guarantee():
    problems = [Problem(M=5, N=7, dtype="fp64"), Problem(B=2, dtype="fp64")]
    assert verify(eager(), problems=problems).judged == 2
    report = verify(eager("v of the first batch entry for all"), problems=problems)
    assert {finding.guarantee for finding in report.findings} >= {"G1 accuracy", "G9 independence"}


def test_an_exception_in_a_check_hides_no_other_finding():
    class Tires(Eager):
        def spoil(self, out, lse, live, N, config):
            if self.calls > 1:
                raise ValueError("once is enough")
            return out * 1.001, lse

    report = verify(Tires(), problems=[Problem(M=2, N=3, dtype="fp64")])
    found = [finding.guarantee for finding in report.findings]
    assert {"G1 accuracy", "T3 logic in float64", "exception"} <= {*found}
    assert found.count("exception") == 1


def test_undeclared_features_are_reported_as_unchecked():
    subject = eager()
    subject.masks = ()
    report = verify(subject, problems=2, guarantees=("G1", "G4", "G5"))
    assert report
    assert set(report.unchecked) == {"G4", "G5"}
    assert "G4 was not checked: Eager declares masks=()" in str(report)


def test_logic_in_float64_is_not_applicable_without_float64():
    subject = eager()
    subject.dtypes = ("fp32",)
    report = verify(subject, problems=1, guarantees=("G1", "T3"))
    why = "not applicable without fp64: Eager declares dtypes=('fp32',)"
    assert report.unchecked == {"T3": why}
    assert f"T3 was not checked: {why}" in str(report)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("G3", "not applicable where every row sees a key"),
        ("G4", "not applicable without padding"),
        ("G5", "not applicable where every row sees every key"),
        ("G9", "not applicable to one batch entry and one key/value head"),
        ("T3", "not applicable without fp64: the problem is in fp32"),
    ],
)
def test_a_guarantee_that_is_applicable_to_no_problem_is_reported(name, why):
    plain, subject = Problem(M=3, N=2), eager()
    subject.dtypes = ("fp32", "fp64")
    report = verify(subject, problems=[plain], guarantees=(name,))
    assert report
    assert report.unchecked == {name: why}
    assert f"{name} was not checked: {why}" in str(report)
    every = Problem(
        B=2, M=3, N=2, dtype="fp64", mask=Mask(causal=True, seqlens_q=(3, 2), seqlens_k=(2, 1))
    )
    assert verify(subject, problems=[plain, every, plain], guarantees=(name,)).unchecked == {}


class OfTwoHeads(Eager):
    """It refuses every number of heads but two."""

    def __call__(self, q, k, v, **rest):
        if q.shape[1] != 2:
            raise NotImplementedError(f"needs 2 heads, got {q.shape[1]}")
        return super().__call__(q, k, v, **rest)


def test_a_slice_that_the_subject_refuses_is_reported_with_its_reason():
    report = verify(OfTwoHeads(), problems=[Problem(H=2, Hk=2, M=3, N=2)], guarantees=("G9", "G13"))
    assert report
    why = "not applicable to OfTwoHeads, which refuses"
    assert report.unchecked == {
        "G9": f"{why} one batch entry and head alone: needs 2 heads, got 1",
        "G13 after another H": f"{why} it: needs 2 heads, got 4",
    }


def test_a_configuration_is_drawn_in_the_dtypes_of_its_own():
    subject = eager()
    subject.configs = {"default": {}, "narrow": {"dtypes": ("fp32",)}}
    report = verify(subject, problems=2, guarantees=("G2",))
    assert report
    assert {key.split()[1] for key in report.worst} == {"fp64", "fp32"}
    assert report.unchecked == {}


def test_a_run_that_judges_nothing_is_no_pass():
    def refuses(q, k, v, *, mask, sm_scale):
        raise NotImplementedError("not today")

    report = verify(refuses, problems=2, guarantees=("G1",))
    assert not report
    assert report.findings == ()
    assert report.unsupported.keys() == {"not today"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"guarantees": ("G1", "G99")}, r"guarantees has \['G99'\]; needs keys or titles, some of"),
        ({"guarantees": ()}, "guarantees is empty"),
        ({"device": "tpu"}, "device is 'tpu'; needs 'cpu' or 'cuda'"),
        ({"problems": 0}, "problems is 0; needs at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        verify(eager(), **arguments)


def test_a_kernel_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"kernel is 3; needs a callable f\(q, k, v"):
        verify(3)


def test_an_old_name_of_the_public_api_is_refused_with_the_new_one():
    with pytest.raises(TypeError, match="no argument subject; it is called kernel now"):
        verify(subject=eager())
    report = Report("attention", "nothing", (), 0, 0, {}, {}, {}, "")
    assert report.kernel == "attention"
    with pytest.raises(AttributeError, match="'subject'; subject is now called kernel"):
        _ = report.subject
    with pytest.raises(AttributeError, match=r"Report has no attribute 'passed'$"):
        _ = report.passed


def test_a_missing_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fa_verify.nothing


def merge(outs, lses):
    return torch_merge(outs, lses)


merge.states, merge.dtypes = True, ("fp32",)


def late_merge(outs, lses):
    out, lse = torch_merge(outs, lses)
    return out, lse + 1.0


late_merge.states, late_merge.dtypes = True, ("fp32",)


def test_a_function_that_merges_is_verified_by_title_or_key():
    report = verify(merge, problems=4, guarantees=["merging", "S2"])
    assert report, str(report)
    assert {key.split()[0] for key in report.worst} == {"out", "lse", "douts", "dlses"}
    assert not verify(late_merge, problems=4, guarantees=["conventions"])
    report = verify(late_merge, problems=2, guarantees=["S1", "S2"])
    assert not report
    finding = report.findings[0]
    assert finding.guarantee == "S1 merging"
    assert finding.replay.startswith("verify(late_merge, problems=[call_from_json(")
    again = verify(late_merge, problems=[finding.problem])
    assert {x.guarantee for x in again.findings} >= {"S1 merging", "S2 conventions"}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_kernel_of_caches_is_verified(is_right):
    function = attend if is_right else drops_the_append
    subject = Subject.of(of_caches(function), "decode")
    report = verify(subject, problems=3, guarantees=["accuracy", "C3", "G8"])
    assert bool(report) is is_right, str(report)
    assert report.unchecked["G8"] == "decode takes no call that asks for it"
    assert ("C3 append" in report.unchecked) is False


def of_caches(function):
    def decode(q, k_cache, v_cache, *, cache_seqlens, page_table, k=None, v=None, sm_scale):
        return function(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, page_table=page_table,
            causal=False, window_size=(None, None), sm_scale=sm_scale,
        )  # fmt: skip

    decode.cache, decode.masks, decode.dtypes = ("paged", "append"), (), ("fp32",)
    decode.head_dims, decode.page_sizes = (8,), (4,)
    return decode


def test_all_that_is_asked_of_single_calls_is_the_default():
    """A subject of every kind is asked for the guarantees of every kind."""
    both = dataclasses.replace(Subject.of(merge, "merge"), call=lambda *_, **__: None)
    asked = {claim.name for claim in _asked(both, None) if claim.kind == "attention"}
    assert asked == set(claims_of("call"))
    assert {claim.kind for claim in _asked(both, None)} == {"attention", "merge"}
    assert [x.name for x in _asked(both, ["RMS"])] == ["rms"]
    # Every call is asked for these.
    assert {x.name for x in _asked(both, ["form"])} == {"G1", "accuracy"}
    # A kind without single calls that ask for it has others.
    assert [x.name for x in _asked(both, ["I1"])] == ["I1"]


def test_a_declared_score_modification_is_drawn():
    """The fault of flash-attention#2396: a softcap that is a product with its tanh."""

    def product(q, k, v, *, mask, sm_scale, softcap=None):
        scores = q @ k.mT * sm_scale
        if softcap is not None:
            scores = scores * torch.tanh(scores / softcap)
        return torch.softmax(scores, -1) @ v

    product.dtypes, product.masks, product.gqa, product.zero_sizes = ("fp64",), (), False, False
    product.score_mods = ("softcap",)
    report = verify(product, problems=20, guarantees=["G1"])
    assert not report
    assert {finding.problem.softcap for finding in report.findings} - {None}
    assert "score_mods softcap" not in report.unchecked


def test_declared_values_that_a_kernel_refuses_are_unchecked():
    class Narrow(Eager):
        def __call__(self, q, k, v, **rest):
            if q.shape[3] > 96 or rest.get("bias") is not None:
                raise NotImplementedError("96 columns at most, and no bias")
            return super().__call__(q, k, v, **rest)

    subject = Narrow()
    subject.dtypes, subject.head_dims, subject.dv_ne_d = ("fp64",), (64, 112), False
    subject.score_mods = ("softcap", "bias")
    report = verify(subject, problems=2, guarantees=["G2"])
    assert "head_dims 112" in report.unchecked
    (mods,) = (key for key in report.unchecked if key.startswith("score_mods "))
    assert mods.endswith("bias")
    assert "head_dims 112 was not checked: no problem that was judged has it" in str(report)


def test_gradients_of_a_bias_and_promised_bits_are_asked_by_default():
    plain, modified = eager(), eager()
    modified.score_mods, modified.same_bits = ("bias", "sinks"), ("batch",)
    asked = [{x.name for x in _asked(Subject.of(of, "f"), None)} for of in (plain, modified)]
    assert asked[1] - asked[0] == {"dbias", "dsinks", "I1"}
    forward = eager()
    forward.score_mods, forward.backward = ("bias",), False
    assert {x.name for x in _asked(Subject.of(forward, "f"), None)} == asked[0]
