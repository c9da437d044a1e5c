"""Every kind of call is drawn, run, shrunk and described by one record of functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.properties.guarantees.claims import standing_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kinds.feature import Feature, is_soft, phrase
from fa_verify.properties.kinds.registry import KINDS, kind_of, kinds_of
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.causes import described, difference
from fa_verify.properties.search.minimize import minimized
from fa_verify.properties.search.search import Runner
from tests.altered.quantised import right
from tests.unit.properties.guarantees.test_cache_checks import attend
from tests.unit.properties.guarantees.test_merging_checks import torch_merge, whole_attention
from tests.unit.properties.problems.sampling import drawn


def decode(q, k_cache, v_cache, *, window_size=(None, None), **given):
    return attend(q, k_cache, v_cache, window_size=window_size, **given)


def attention(q, k, v, *, mask, sm_scale):
    return whole_attention(q, k, v, mask=mask, sm_scale=sm_scale)


attention.returns_lse, attention.lse_grad, attention.states = True, True, torch_merge
attention.kvcache, attention.dtypes, attention.masks = decode, ("fp32",), ("causal", "padding")
attention.p_dtype, attention.p_normalised = "fp32", True
SUBJECT = Subject.of(attention, "attention")
NEEDS = {"attention": {"max_seqlen": 20}, "quantised": {"dtype": "bf16", "max_seqlen": 20}}
# It takes calls of every kind but this.
SUBJECTS = {"quantised": right("plain")}


def calls_of(kind: str, count: int = 12) -> list:
    draw, needs = KINDS[kind].draw, {"dtype": "fp32", **NEEDS.get(kind, {})}
    return drawn(draw(subject_of(kind), device="cpu", **needs), count)


def subject_of(kind: str) -> Subject:
    return SUBJECTS.get(kind, SUBJECT)


def test_a_kernel_takes_the_kinds_that_it_declares():
    assert kinds_of(SUBJECT) == tuple(kind for kind in KINDS if kind not in SUBJECTS)
    assert kinds_of(SUBJECTS["quantised"]) == ("quantised",)
    assert kinds_of(dataclasses.replace(SUBJECT, backward=False)) == ("attention", "merge", "cache")
    merge = Subject.of(_states(), "merge")
    assert kinds_of(merge) == ("merge",)


def _states():
    def merge(outs, lses):
        return torch_merge(outs, lses)

    merge.states = True
    return merge


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls_are_supported_and_have_one_json_form(kind):
    for call in calls_of(kind):
        assert call.kind == kind
        assert kind_of(call) is KINDS[kind]
        assert KINDS[kind].excludes(subject_of(kind), call) is None
        assert call_from_json(call.to_json()) == call


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_kernel_holds_and_is_counted(kind):
    runner = Runner(subject_of(kind), Tally())
    for call in calls_of(kind, 4):
        assert runner.findings(call, lambda trial: []) == []
    assert runner.judged + runner.out_of_range == 4
    assert len(runner.tally.problems) == runner.judged > 0
    outputs = {key.split()[0] for key in runner.tally.worst}
    assert "out" in outputs
    assert max(ratio for ratio, _ in runner.tally.worst.values()) <= 1
    for claim in standing_of(kind):
        runs = (KINDS[kind].run(subject_of(kind), x) for x in calls_of(kind, 4))
        trial = next(filter(None, runs))
        assert claim.check(trial) == []


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_are_other_calls_and_less_complex(kind):
    of = KINDS[kind]
    count = 0
    for call in calls_of(kind):
        for simpler in of.reductions(call):
            count += 1
            assert simpler != call
            assert of.complexity(simpler) < of.complexity(call), (call, simpler)
    assert count > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_has_its_features_and_others_lack_them(kind):
    of = KINDS[kind]
    lacked = set()
    for call in calls_of(kind, 30):
        for feature in of.features(call):
            assert of.holds(feature, call)
            assert phrase(feature)
            for other in of.without(feature, call, ("default",)):
                assert type(other) is type(call)
                assert not of.holds(feature, other)
                lacked.add(feature.name)
    features = {x.name for call in calls_of(kind, 30) for x in of.features(call)} - {"config"}
    assert features <= lacked


@pytest.mark.parametrize("kind", KINDS)
def test_any_call_shrinks_to_the_simplest(kind):
    of = KINDS[kind]

    @dataclasses.dataclass
    class Found:
        problem: object
        guarantee: str = "every call fails"

    call = max(calls_of(kind), key=of.complexity)
    (found,) = minimized(call, [Found(call)], lambda other: [Found(other)])
    plain = {"merge": "parts=(1,) M=1 fp32", "quantised": "M=1 N=1 bf16"}
    assert not [*of.reductions(found.problem)]
    assert described(found.problem).startswith(plain.get(kind, "M=1 N=1 fp32")) or kind == "merge"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kernel_excludes_is_not_drawn(kind):
    subject = dataclasses.replace(subject_of(kind), dtypes=("bf16",))
    with pytest.raises(ExcludedError, match="declares dtypes"):
        KINDS[kind].draw(subject, device="cpu", **{**NEEDS.get(kind, {}), "dtype": "fp16"})
    alone = Subject.of(_states(), "merge")
    if kind != "merge":
        assert kind not in kinds_of(alone)


def test_thresholds_and_sets_say_whether_another_call_has_them():
    merge = MergeProblem(parts=(1, 1, 1), dtype="fp16")
    holds = KINDS["merge"].holds
    assert holds(Feature("parts above", 2), merge)
    assert not holds(Feature("parts above", 3), merge)
    assert holds(Feature("dtype", ("fp16", "bf16")), merge)
    assert not holds(Feature("dtype", ("fp32",)), merge)
    assert is_soft(Feature("parts above", 2))
    assert phrase(Feature("lse family", ("low",))) == "lse=low"


def test_calls_are_described_by_their_own_fields_and_those_of_their_attention():
    (call, *_) = [x for x in calls_of("cache", 30) if x.page_size > 1 and x.attention.M == 1]
    other = changed(call, page_size=1, shared=0)
    assert f"page_size={call.page_size}" in described(call)
    assert "page_size=1" in difference(call, other)
    ring = calls_of("ring", 5)[-1]
    assert "lengths=" in described(ring)


def test_a_kernel_of_two_states_merges_more_in_turn():
    def two(outs, lses):
        if len(outs) != 2:
            raise NotImplementedError("two states at a time")
        return torch_merge(outs, lses)

    two.states, two.backward = True, False
    subject = Subject.of(two, "two")
    for parts in ((), (3,), (3, 5), (3, 5, 2, 4)):
        trial = KINDS["merge"].run(subject, MergeProblem(parts=parts, M=3, Dv=4))
        assert [*trial.outputs] == ["out", "lse"]
        assert all(part[name] <= 1 for part in trial.peaks for name in part)
        assert torch.isfinite(trial.bound.out).all()
