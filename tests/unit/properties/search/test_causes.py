"""Failures are grouped by cause: planted faults alone, in pairs, and in any order."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch
from hypothesis import strategies as st

from fa_verify.conformance import test_quick as quick
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.guarantees.invariance import sequence
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature, sharpest
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search import declaring
from fa_verify.properties.search import failure as failure_module
from fa_verify.properties.search.causes import Known, RootCause, described, difference
from fa_verify.properties.search.failure import Beyond, Failure
from fa_verify.properties.search.search import Runner, attack, draws
from fa_verify.quick import Entry

EMPTY = Problem(M=2, N=1, mask=Mask(causal=True))
GROUPED = Problem(H=4, Hk=2, M=3, N=2, dtype="fp16")
LONG = Problem(M=20, N=3)
WIDE = Problem(M=2, N=3, Dv=8)
CAUSAL = Problem(H=2, Hk=2, M=4, N=5, mask=Mask(causal=True))
BOTH = Problem(H=4, M=5, N=3, dtype="bf16", mask=Mask(causal=True))


def runner_of(*faults: str) -> Runner:
    """A runner of attention in float64 with planted faults."""

    def attention(q, k, v, *, mask, sm_scale):
        groups = q.shape[1] // k.shape[1]
        if "needs 32" in faults and q.shape[2] % 32:
            raise RuntimeError("M is no multiple of 32")
        if "raises in fp32" in faults and q.dtype == torch.float32:
            raise RuntimeError("fp32 is not supported")
        if "raises" in faults and q.shape[3] != v.shape[3]:
            raise RuntimeError(f"sizes {q.shape[3]} and {v.shape[3]}")
        if "rounded" in faults:
            k, v = (x.repeat_interleave(groups, 1).double() for x in (k, v))
        else:
            k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
        if "first lengths" in faults and mask.seqlens_k is not None:
            mask = dataclasses.replace(mask, seqlens_k=mask.seqlens_k[:1] * len(q))
        seen = mask.dense(*q.shape[:3], k.shape[2])
        weights = (q.double() @ k.mT * sm_scale).masked_fill(~seen, -math.inf).softmax(3)
        if "unguarded" not in faults:
            weights = torch.where(seen, weights, 0.0)
        out = weights @ v
        if "padding counted" in faults and q.shape[2] % 16:
            out = 3 * out
        if "causal NaN" in faults and mask.causal:
            out = math.nan * out
        if "scaled" in faults:
            out = 1.5 * out
        if "causal scaled" in faults and mask.causal:
            out = 1.5 * out
        if "bound scaled" in faults and mask.right is not None:
            out = 1.5 * out
        if "hidden scaled" in faults and bool((seen.any(3) & ~seen.all(3)).any()):
            out = 1.5 * out
        if "wide tile" in faults:
            tile = 16 if q.dtype == torch.float32 else 32
            out = torch.cat([out[:, :, :tile], 2 * out[:, :, tile:]], 2)
        if "second tile" in faults:
            out = torch.cat([out[:, :, :16], 2 * out[:, :, 16:]], 2)
        return out.to(q.dtype)

    attention.p_dtype, attention.p_normalised = "fp32", True
    return Runner(Subject.of(attention, "attention"), Tally())


def causes_of(runner: Runner, problem: Problem, store: Known) -> list[RootCause]:
    """The causes of a problem that fails the check of accuracy."""
    findings = runner.findings(problem, accuracy)
    assert findings
    numbers = Failure(runner, accuracy, findings, store).causes()
    store.known()
    return [store.causes[store.number(x)] for x in numbers]


PLANTED = {
    "unguarded": (EMPTY, "NaN", {"empty rows"}),
    "rounded": (GROUPED, "slight", {"grouped heads", "dtype"}),
    "second tile": (LONG, "error", {"M above"}),
    "causal scaled": (CAUSAL, "error", {"right bound", "causal"}),
    "bound scaled": (CAUSAL, "error", {"right bound"}),
    "hidden scaled": (CAUSAL, "error", {"hidden keys"}),
    "wide tile": (LONG, "error", {"M above"}),
    "raises": (WIDE, "raises RuntimeError", {"D != Dv"}),
    # The entry without a key has the one of the other, which is no fault of empty rows.
    "first lengths": (Problem(B=2, N=3, mask=Mask(seqlens_k=(1, 0))), "error",
                      {"padded keys", "entries of different lengths"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_cause_has_the_features_that_its_fault_needs(fault):
    problem, kind, needed = PLANTED[fault]
    runner = runner_of(fault)
    (cause,) = causes_of(runner, problem, Known())
    assert cause.kind.split(" at ")[0] == kind
    hard = {x.name for x in cause.hard}
    assert hard == needed
    assert runner.findings(cause.problem, accuracy)
    assert cause.passing is not None
    judged = runner.judged
    assert not runner.findings(cause.passing, accuracy)
    assert runner.judged > judged


PAIRS = (("unguarded", "rounded"), ("second tile", "raises"))


@pytest.mark.parametrize("pair", [*PAIRS, *(x[::-1] for x in PAIRS)], ids="-".join)
def test_two_faults_have_two_causes_in_any_order(pair):
    runner, store = runner_of(*pair), Known()
    for fault in pair:
        causes_of(runner, PLANTED[fault][0], store)
    found = [{x.name for x in cause.hard} for cause in store.known()]
    assert sorted(map(sorted, found)) == sorted(sorted(PLANTED[fault][2]) for fault in pair)


def test_a_known_cause_explains_other_problems_in_other_dtypes():
    runner, store = runner_of("unguarded"), Known()
    causes_of(runner, EMPTY, store)
    for mask in (Mask(seqlens_k=(0,)), Mask(window_right=0), Mask(causal=True, seqlens_k=(3,))):
        problem = Problem(H=2, Hk=2, M=6, N=5, dtype="bf16", mask=mask)
        causes_of(runner, problem, store)
    assert len(store.known()) == 1


def test_a_fault_behind_a_known_one_is_found_on_a_problem_without_it():
    runner, store = runner_of("unguarded", "rounded"), Known()
    causes_of(runner, EMPTY, store)
    # Its rows without a key give NaN, which hides the rounding.
    known, cause = causes_of(runner, BOTH, store)
    assert {x.name for x in known.hard} == {"empty rows"}
    assert {x.name for x in cause.hard} == {"grouped heads", "dtype"}


def test_the_smallest_problem_of_a_fault_does_not_show_a_known_one():
    """With N = 1, the rows without a key give NaN, and a key is hidden on the problem beside it."""
    store = Known()
    causes_of(runner_of("unguarded"), EMPTY, store)
    runner = runner_of("unguarded", "hidden scaled")
    (cause,) = causes_of(runner, dataclasses.replace(EMPTY, M=4, N=3), store)
    assert (cause.kind, [x.name for x in cause.hard]) == ("error", ["hidden keys"])


def test_a_declaration_with_which_the_failures_pass_is_named():
    (cause,) = causes_of(runner_of("rounded"), GROUPED, Known())
    assert cause.declarations == ('group_sum="dtype"',)
    (cause,) = causes_of(runner_of("second tile"), LONG, Known())
    assert cause.declarations == ()


def test_a_wrong_call_among_others_is_explained_by_its_own_problem():
    runner, store = runner_of("unguarded"), Known()
    (cause,) = causes_of(runner, EMPTY, store)
    plain = Problem(M=3, N=3)
    findings = runner.findings(plain, sequence)
    # The call that follows, among those of G13, is one of the known cause.
    assert findings[0].guarantee == "G1 accuracy"
    assert findings[0].problem != plain
    assert Failure(runner, sequence, findings, store).causes() == [cause.number]


def test_a_smaller_problem_that_fails_for_another_cause_explains_nothing():
    """The problem shrinks to M = 1, where the padding is counted, and is not explained by that."""
    runner, store = runner_of("padding counted", "causal NaN"), Known()
    (cause,) = causes_of(runner, Problem(M=16, N=16, mask=Mask(causal=True)), store)
    assert (cause.kind, cause.hard[-1].name) == ("NaN", "causal")
    assert "M is no multiple of 16" in [x.features[0].name for x in store.known()]


def test_nan_below_the_size_from_which_values_are_wrong_is_another_fault():
    store = Known()
    (large,) = causes_of(runner_of("second tile"), dataclasses.replace(LONG, dtype="fp16"), store)
    store.replace(dataclasses.replace(large, features=(*large.features, Feature("causal"))))
    small = Problem(M=8, N=8, dtype="fp16", mask=Mask(causal=True))
    (wrong,) = causes_of(runner_of("causal NaN"), small, store)
    assert (wrong.kind, wrong.number) == ("NaN", 2)
    # Other wrong values below it may be the same fault in a dtype of another threshold.
    (wrong,) = causes_of(runner_of("causal scaled"), small, Known())
    assert store.known()[0].covers(wrong)


def test_several_checks_are_made_beside_the_problem_that_one_of_them_failed():
    """The second fault is found by another check, which the first one hides on that problem."""
    runner, store = runner_of("second tile"), Known()
    problem = dataclasses.replace(LONG, dtype="fp16", mask=Mask(window_left=3))
    findings = runner.findings(problem, accuracy)
    failure = Failure(runner, accuracy, findings, store)
    (number,) = failure.causes()
    beside = [*failure.without_each([number])]
    assert beside
    assert all(x.M <= 16 for x in beside)
    assert not any(runner.findings(x, accuracy) for x in beside)


def test_a_quick_problem_is_judged_again_beyond_the_cause_to_which_it_shrank():
    runner, store = runner_of("padding counted", "causal NaN"), Known()
    entry = Entry(Problem(M=3, N=3, mask=Mask(causal=True)), ("G1",))
    with pytest.raises(Violation) as failed:
        quick.test_a_problem_that_kills_faults_holds(runner, entry)
    assert failed.value.findings[0].problem.mask == Mask()
    Failure(runner, failed.value.claim, failed.value.findings, store).causes()
    with pytest.raises(Violation) as beyond:
        failed.value.again(Beyond(runner, store, 60.0))
    Failure(runner, beyond.value.claim, beyond.value.findings, store).causes()
    assert [x.kind for x in store.known()] == ["error", "NaN"]


@pytest.mark.parametrize("other", [(), ("scaled",)])
def test_an_exception_of_sizes_is_no_exception_of_every_problem(other):
    """Where it does not raise, another fault may stand, which is not known yet."""
    runner, store = runner_of("needs 32", *other), Known()
    cause, *_ = causes_of(runner, Problem(M=3, N=3), store)
    assert [x.name for x in cause.features] == ["M is no multiple of 32"]
    assert (cause.passing is None) == bool(other)
    # The fault behind the exception is found, and the exception explains the failure too.
    assert causes_of(runner, Problem(M=5, N=3), store)[0] == store.known()[0]
    assert [x.kind.split()[0] for x in store.known()] == ["raises", *(["error"] if other else [])]


def test_an_exception_on_every_problem_is_one_cause_of_all_guarantees():
    """Two workers may find it at the same time, by the checks of two guarantees."""

    def attention(q, k, v, *, mask, sm_scale):
        raise RuntimeError("no")

    store = Known()
    runner = Runner(Subject.of(attention, "attention"), Tally())
    (cause,) = causes_of(runner, EMPTY, store)
    assert cause.features == ()
    store.add(dataclasses.replace(cause, number=0, guarantee="G8 layout"))
    assert len(store.known()) == 1


def test_a_cause_survives_json():
    for fault, (problem, *_) in PLANTED.items():
        (cause,) = causes_of(runner_of(fault), problem, Known())
        assert RootCause.of(json.loads(json.dumps(cause.record()))) == cause


def test_problems_are_described_by_what_they_have():
    assert described(EMPTY) == "M=2 N=1 fp32 causal"
    assert difference(EMPTY, Problem(M=1, N=1)) == "M=1, no mask"


def test_drawing_goes_on_past_a_known_cause():
    runner, store = runner_of("unguarded", "rounded"), Known()
    # The first fails for both faults, the second for a known one, the third for none.
    drawn = st.sampled_from([BOTH, EMPTY, Problem()])
    with pytest.raises(Violation) as failed:
        attack(runner, accuracy, st.just(EMPTY), seed="", settings=draws(2))
    Failure(runner, accuracy, failed.value.findings, store).causes()
    with pytest.raises(Violation) as failed:
        attack(Beyond(runner, store, 60.0), accuracy, drawn, seed="", settings=draws(20))
    Failure(runner, accuracy, failed.value.findings, store).causes()
    assert [cause.kind for cause in store.known()] == ["NaN", "slight"]
    # Every failure is explained now.
    beyond = Beyond(runner, store, 60.0)
    failed.value.again(beyond)
    assert beyond.judged > 0


def test_a_cause_that_another_process_finds_does_not_change_a_search():
    runner, store = runner_of("unguarded"), Known()
    beyond = Beyond(runner, store, 60.0)
    Failure(runner, accuracy, runner.findings(EMPTY, accuracy), store).causes()
    assert beyond.findings(EMPTY, accuracy)
    assert not Beyond(runner, store, 60.0).findings(EMPTY, accuracy)


def test_causes_are_joined_once_one_of_them_covers_the_other():
    runner, store = runner_of("rounded"), Known()
    (number,) = [store.add(x) for x in causes_of(runner, GROUPED, Known())]
    (whole,) = store.known()
    of_dk = dataclasses.replace(whole, outputs=("dk",))
    store.replace(dataclasses.replace(whole, outputs=("dv",)))
    other = store.add(of_dk)
    assert len(store.known()) == 2
    # Another failure shows that the first fault is in both.
    store.replace(dataclasses.replace(whole, outputs=("dv", "dk")))
    assert [x.number for x in store.known()] == [number] == [store.number(other)]


@pytest.mark.parametrize("first", [True, False])
def test_an_exception_is_of_one_dtype_although_values_are_wrong_in_others(first, monkeypatch):
    """Where every problem is compiled anew, the time runs out before all features are known."""
    runner, store = runner_of("raises in fp32", "causal scaled"), Known()
    if first:
        causes_of(runner, Problem(), store)
    monkeypatch.setattr(failure_module, "SECONDS", 0.0)
    (hurried,) = causes_of(runner, CAUSAL, Known())
    assert hurried.dtypes == ("fp32",)
    store.add(hurried)
    monkeypatch.undo()
    if not first:
        causes_of(runner, Problem(), store)
    (cause,) = store.known()
    assert [x.name for x in cause.features] == ["dtype"]


def test_a_part_that_needs_more_features_is_not_shown_for_its_cause():
    store = Known()
    causes_of(runner_of("rounded"), GROUPED, store)
    (cause,) = store.known()
    features = (*cause.features, Feature("empty rows"))
    part = dataclasses.replace(
        cause, kind="NaN", features=features, problem=EMPTY, declarations=(), outputs=("dv", "out")
    )
    assert store.add(part) == cause.number
    (joined,) = store.known()
    assert (joined.kind, joined.problem) == (cause.kind, cause.problem)
    assert joined.declarations == cause.declarations != ()
    assert "out" in joined.outputs


def attended(q, k, v, mask, sm_scale):
    """Attention in float64."""
    groups = q.shape[1] // k.shape[1]
    seen = mask.dense(*q.shape[:3], k.shape[2])
    scores = q.double() @ k.repeat_interleave(groups, 1).double().mT * sm_scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(3)
    return torch.where(seen, weights, 0.0) @ v.repeat_interleave(groups, 1).double()


def runner_with(fault, **declared) -> Runner:
    """A runner of attention in float64 whose out is a function of itself and the tensors."""

    def attention(q, k, v, *, mask, sm_scale):
        return fault(attended(q, k, v, mask, sm_scale), q, k, v).to(q.dtype)

    fields = {"p_dtype": "fp32", "p_normalised": True, **declared}
    for name, value in fields.items():
        setattr(attention, name, value)
    return Runner(Subject.of(attention, "attention"), Tally())


def late_maximum(out, q, k, v):
    """Rows whose largest score is one of a key past the 16th are wrong."""
    scores = q.double() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).double().mT
    late = scores.argmax(3, keepdim=True) >= 16 if k.shape[2] else torch.tensor(False)
    return torch.where(late, 2 * out, out)


SHAPES = {
    "some rows of N > 16": (late_maximum, {"N above": 16}),
    "D odd": (
        lambda out, q, k, v: out * (1 + q.shape[3] % 2), {"D is no multiple of 2": None},
    ),
    "D ragged": (
        lambda out, q, k, v: out * (1 + bool(q.shape[3] % 8)), {"D is no multiple of 8": None},
    ),
    "N > 17": (lambda out, q, k, v: out * (1 + (k.shape[2] > 17)), {"N above": 17}),
    "16 < N < 32": (
        lambda out, q, k, v: out * (1 + (16 < k.shape[2] < 32)), {"N above": 16, "N up to": 31},
    ),
    "ragged": (
        lambda out, q, k, v: out * (1 + bool(q.shape[2] % 16 or k.shape[2] % 16)),
        {"M or N is no multiple of 16": None},
    ),
    "D = 48": (lambda out, q, k, v: out * (1 + (q.shape[3] == 48)), {"D is 48": None}),
    "D > 40": (lambda out, q, k, v: out * (1 + (q.shape[3] > 40)), {"D above": 40}),
    "G > 4": (lambda out, q, k, v: out * (1 + (q.shape[1] // k.shape[1] > 4)), {"G above": 4}),
    "H > 1": (lambda out, q, k, v: out * (1 + (q.shape[1] > 1)), {"H above": 1}),
    "everything": (lambda out, q, k, v: out * 2, {}),
    # Some elements err, more of them in larger tensors.
    "an element": (lambda out, q, k, v: torch.where(out > 0.8, 2 * out, out), {}),
}  # fmt: skip


@pytest.mark.parametrize("fault", SHAPES)
def test_sizes_of_a_cause_are_those_at_which_a_kernel_changes(fault):
    wrong, needed = SHAPES[fault]
    dims = (16, 32, 40, 41, 42, 43, 48, 64, 128) if fault[0] == "D" else None
    runner = runner_with(wrong, **({"head_dims": dims} if dims else {}), dtypes=("fp32",))
    D = 41 if fault in ("D odd", "D ragged") else 48 if fault[0] == "D" else 16
    problem = Problem(B=2, H=10, Hk=2, M=21, N=27, D=D, Dv=D)
    (cause,) = causes_of(runner, problem, Known())
    assert dict(cause.features) == needed
    assert not cause.untried


CONJUNCTIONS = {
    # The condition, a problem that fails, and the names of the features that its cause has.
    "whole tiles of keys under a ragged tile of rows": (
        lambda q, k, v, mask: mask.causal and q.shape[2] > 32 and q.shape[2] % 32
        and k.shape[2] % 32 == 0,
        Problem(M=70, N=64, mask=Mask(causal=True)),
        {"causal", "M above 32", "M is no multiple of 32", "N is a multiple of 32"},
    ),
    "a window of 0 keys": (
        lambda q, k, v, mask: mask.window_left == 0,
        Problem(M=5, N=9, mask=Mask(window_left=0)), {"window left of 0"},
    ),
    "any diagonal with lengths of rows": (
        lambda q, k, v, mask: mask.seqlens_q is not None
        and (mask.right is not None or mask.window_left is not None),
        Problem(M=5, N=9, mask=Mask(causal=True, seqlens_q=(3,))), {"padded rows", "diagonal"},
    ),
    "the batch stride of k": (
        lambda q, k, v, mask: k.shape[0] > 1 and k.stride(0) != k[0].numel(),
        Problem(B=2, H=2, Hk=2, M=3, N=5, layouts=("bhsd", "padded", "bhsd", "bhsd")),
        {"batch stride of k"},
    ),
    "columns of no power of two": (
        lambda q, k, v, mask: q.shape[3].bit_count() > 1,
        Problem(M=3, N=5, D=24, Dv=24), {"D is no power of two"},
    ),
    "groups of three": (
        lambda q, k, v, mask: k.shape[1] > 1 and (q.shape[1] // k.shape[1]).bit_count() > 1,
        Problem(H=12, Hk=4, M=3, N=5), {"G is no power of two", "Hk above 1"},
    ),
    "odd groups": (
        lambda q, k, v, mask: q.shape[1] // k.shape[1] % 2 and q.shape[1] > k.shape[1],
        Problem(H=10, Hk=2, M=3, N=5), {"G is no multiple of 2", "grouped heads"},
    ),
    "ragged last tile of a sequence": (
        lambda q, k, v, mask: any(x > 64 and x % 64 for x in mask.seqlens_q or ()),
        Problem(B=2, M=80, N=9, mask=Mask(seqlens_q=(75, 3))),
        {"padded rows", "seqlens_q above 64", "seqlens_q is no multiple of 64"},
    ),
    "a sequence without rows": (
        lambda q, k, v, mask: 0 in (mask.seqlens_q or ()),
        Problem(B=3, M=4, N=5, mask=Mask(seqlens_q=(2, 0, 4))),
        {"empty sequences", "entries of different lengths"},
    ),
    "strides of k for v": (
        lambda q, k, v, mask: k.shape[2] > 1 and k.stride(2) != v.stride(2),
        Problem(M=3, N=5, layouts=("bhsd", "bhsd", "padded", "bhsd")),
        {"k and v of other strides"},
    ),
    "strides of q for k": (
        lambda q, k, v, mask: q.shape[2] > 1 and k.shape[2] > 1 and q.stride(2) != k.stride(2),
        Problem(M=3, N=5, layouts=("bhsd", "padded", "bhsd", "bhsd")),
        {"q and k of other strides", "M above 1", "N above 1"},
    ),
    "many heads, not all in whole swizzles": (
        lambda q, k, v, mask: len(q) * q.shape[1] > 8 and len(q) * q.shape[1] % 8,
        Problem(B=3, H=5, Hk=5, M=3, N=5), {"B * H above 8", "B * H is no multiple of 8"},
    ),
    "columns of v past those of k": (
        lambda q, k, v, mask: v.shape[3] > k.shape[3],
        Problem(M=3, N=5, D=16, Dv=40), {"D < Dv"},
    ),
    "a window to the right": (
        lambda q, k, v, mask: mask.right, Problem(M=6, N=5, mask=Mask(window_right=3)),
        {"window right"},
    ),
    "lengths without a causal mask": (
        lambda q, k, v, mask: mask.seqlens_k is not None and mask.right is None,
        Problem(M=6, N=5, mask=Mask(seqlens_k=(3,))), {"padded keys", "not causal"},
    ),
    "one row and many keys": (
        lambda q, k, v, mask: q.shape[2] == 1 and k.shape[2] > 64,
        Problem(N=90), {"M is 1", "N above 64"},
    ),
    "heads that are masked by H - 1": (
        lambda q, k, v, mask: q.shape[1].bit_count() > 1,
        Problem(H=6, Hk=6, M=4, N=9), {"H is no power of two"},
    ),
    "a right window beside causal masks that hold": (
        lambda q, k, v, mask: mask.right is not None and not mask.causal,
        Problem(M=6, N=9, mask=Mask(window_right=2)), {"right bound", "not causal"},
    ),
    "every second tile of rows from the third on": (
        lambda q, k, v, mask: q.shape[2] > 32 and -(-q.shape[2] // 16) % 2,
        Problem(M=47, N=5), {"M above 32", "M is no multiple of 32"},
    ),
    "odd numbers of keys": (
        lambda q, k, v, mask: k.shape[2] % 2, Problem(M=4, N=37), {"N is no multiple of 2"},
    ),
    "lengths that differ": (
        lambda q, k, v, mask: len({*(mask.seqlens_k or ())}) > 1,
        Problem(B=3, M=4, N=9, mask=Mask(seqlens_k=(9, 4, 7))),
        {"padded keys", "entries of different lengths"},
    ),
    "no groups beside a second tile": (
        lambda q, k, v, mask: q.shape[1] == k.shape[1] and k.shape[2] > 64,
        Problem(H=3, Hk=3, M=4, N=90), {"not grouped", "N above 64"},
    ),
    "windows between rows and keys of other numbers": (
        lambda q, k, v, mask: mask.window_left is not None and q.shape[2] != k.shape[2],
        Problem(M=4, N=9, mask=Mask(window_left=3)), {"window left", "M != N"},
    ),
    "packed rows of a group": (
        lambda q, k, v, mask: mask.causal and q.shape[1] > k.shape[1]
        and q.shape[2] * q.shape[1] // k.shape[1] > 16,
        Problem(H=3, M=12, N=12, mask=Mask(causal=True)),
        {"causal", "grouped heads", "M * G above"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONJUNCTIONS)
def test_a_cause_names_every_condition_of_a_fault(fault):
    wrong, problem, needed = CONJUNCTIONS[fault]

    def attention(q, k, v, *, mask, sm_scale):
        out = attended(q, k, v, mask, sm_scale).to(q.dtype)
        return 1.5 * out if wrong(q, k, v, mask) else out

    attention.p_dtype, attention.p_normalised = "fp32", True
    (cause,) = causes_of(Runner(Subject.of(attention, "attention"), Tally()), problem, Known())
    names = {x.name: f"{x.name} {x.value}" for x in sharpest(cause.features)}
    exact = {names[x.name] if names[x.name] in needed else x.name for x in sharpest(cause.features)}
    assert exact == needed


def test_a_dtype_is_named_only_if_problems_pass_in_another():
    runner = runner_with(lambda out, q, k, v: out * (1 + (q.dtype == torch.bfloat16)))
    (cause,) = causes_of(runner, Problem(M=3, N=5, dtype="bf16"), Known())
    assert (cause.features, cause.dtypes) == ((Feature("dtype", ("bf16",)),), ("bf16",))
    runner = runner_with(lambda out, q, k, v: 2 * out)
    (cause,) = causes_of(runner, Problem(M=3, N=5, dtype="bf16"), Known())
    assert cause.all_dtypes
    assert cause.every
    assert not cause.features


def test_a_form_is_a_cause_of_its_own_with_what_it_needs():
    runner = runner_with(lambda out, q, k, v: out[..., :-1] if q.dtype == torch.float16 else out)
    (cause,) = causes_of(runner, Problem(M=3, N=5, dtype="fp16"), Known())
    assert cause.dtypes == ("fp16",)
    assert cause.kind.startswith("form: ")
    assert "needs (1, 1, 1, 16)" in cause.kind


@pytest.mark.parametrize(
    ("fault", "origin"),
    [
        (lambda out, q, k, v: out + 0 * _beside(v), "memory beside the inputs"),
        (
            lambda out, q, k, v: out + 0 * torch.empty_like(out),
            "memory that the kernel allocates and does not write",
        ),
        (lambda out, q, k, v: math.nan * out, ""),
    ],
)
def test_a_cause_says_from_which_memory_a_result_is_nan(fault, origin):
    (cause,) = causes_of(runner_with(fault), Problem(M=3, N=5), Known())
    assert (cause.kind, cause.origin) == ("NaN", origin)


def _beside(v):
    """Return the element after the last one of a tensor."""
    end = v.storage_offset() + sum((n - 1) * x for n, x in zip(v.shape, v.stride(), strict=True))
    return v.detach().as_strided((1,), (1,), end + 1)


def test_a_call_that_fails_in_some_runs_needs_no_feature():
    calls = iter(range(10**6))
    runner = runner_with(lambda out, q, k, v: out * (1 + (next(calls) % 3 == 0)))
    (cause,) = causes_of(runner, Problem(H=4, M=3, N=5, mask=Mask(causal=True)), Known())
    failing, runs = cause.runs
    assert 0 < failing < runs == 9
    assert not cause.features
    assert not cause.declarations
    assert cause.depends_on == "chance"


def test_what_differs_in_the_same_calls_of_fresh_processes_depends_on_chance():
    """No call before is named, though the problem passes alone, and fails after others once."""
    runner = runner_with(lambda out, q, k, v: out * (1 + (q.shape[1] == 2)))
    assert not runner.findings(Problem(N=5), accuracy)
    passes = random.Random(3)
    asked = []

    def fresh(calls, name):
        asked.append(len(calls))
        return [passes.random() < 0.75 for _ in calls[:-1]] + [len(asked) != 2]

    found = runner.findings(Problem(H=2, M=3, N=7), accuracy)
    store = Known()
    Failure(runner, accuracy, found, store, fresh).causes()
    (cause,) = store.known()
    assert asked[:2] == [1, 2]
    assert cause.depends_on == "chance"
    assert cause.runs[1] == 9


def kept_tiles():
    """A kernel that keeps the number of tiles of its first call."""
    tiles = []

    def fault(out, q, k, v):
        tiles.append(-(-k.shape[2] // 16))
        return out * (1 + (tiles[0] != tiles[-1]))

    return runner_with(fault)


def test_a_call_that_fails_only_after_another_has_the_shortest_sequence():
    runner = kept_tiles()
    for problem in (Problem(N=5), Problem(M=2, N=7), Problem(N=3)):
        assert not runner.findings(problem, accuracy)
    wrong = Problem(H=2, M=3, N=40)
    found = runner.findings(wrong, accuracy)
    asked = []

    def fresh(calls, name):
        asked.append((len(calls), name))
        anew = kept_tiles()
        return [not anew.findings(call, accuracy) for call in calls]

    store = Known()
    Failure(runner, accuracy, found, store, fresh).causes()
    (cause,) = store.known()
    assert cause.after == (Problem(N=5),)
    assert cause.depends_on == "earlier calls"
    assert not cause.features
    # The problem passes each of the last runs alone.
    assert asked == [(1, "G1"), (2, "G1"), (9, "G1")]
    # Another failure of the same cause is no new one.
    again = runner.findings(Problem(M=9, N=33), accuracy)
    assert Failure(runner, accuracy, again, store, fresh).causes() == [cause.number]
    # Where no process can be asked, the sizes are what the failure shows.
    (alone,) = causes_of(runner, wrong, Known())
    assert alone.after is None
    assert dict(alone.features) == {"N above": 16}


def test_offsets_are_one_cause_that_names_the_tensor():
    """The kernel reads k as if it were contiguous, where its strides are large."""

    def fault(out, q, k, v):
        return out * (1 + (max(k.stride()) > 2**24))

    runner, store = runner_with(fault, dtypes=("fp32",), backward=False), Known()
    for problem in (Problem(B=2, M=3, N=5), Problem(H=2, M=2, N=40, seed=1)):
        assert not runner.findings(problem, accuracy)
        found = runner.findings(problem, claims.far_offsets)
        Failure(runner, claims.far_offsets, found, store).causes()
    (cause,) = store.known()
    assert cause.check == "G12"
    assert not cause.features
    assert "offsets pass 2**31 elements, in k of strides (" in cause.finding["claim"]


def test_a_size_is_not_needed_if_a_tensor_with_other_strides_fails_without_it():
    """The stride of rows is one, or that of the columns."""

    def fault(out, q, k, v):
        rows = k.stride(-2) != k.shape[3] and k.shape[2] > 1
        return out * (1 + (rows or k.stride(-1) != 1))

    layouts = ("bhsd", "bshd", "bhsd", "bhsd")
    (cause,) = causes_of(runner_with(fault), Problem(H=2, Hk=2, N=5, layouts=layouts), Known())
    assert [x.name for x in cause.features] == ["row stride of k"]


class OutOfBoundsError(IndexError):
    """As the interpreter raises it."""


def test_a_load_past_a_tensor_and_a_wrong_one_inside_are_one_cause():
    def fault(out, q, k, v):
        if not k.is_contiguous() and k.shape[2] > 8:
            raise OutOfBoundsError("element 99 of 9")
        return out * (1 + (not k.is_contiguous()))

    runner, store = runner_with(fault, dtypes=("fp32",)), Known()
    layouts = ("bhsd", "transposed", "bhsd", "bhsd")
    for N in (5, 9):
        causes_of(runner, Problem(M=2, N=N, layouts=layouts), store)
    (cause,) = store.known()
    assert [x.name for x in cause.hard] == ["layout of k"]


def test_strides_that_are_wrong_nearby_are_no_distant_offsets():
    def fault(out, q, k, v):
        return out * (1 + (k.stride(-2) < k.stride(-1)))

    runner, store = runner_with(fault, dtypes=("fp32",), backward=False), Known()
    problem = Problem(M=3, N=5)
    found = runner.findings(problem, claims.far_offsets)
    Failure(runner, claims.far_offsets, found, store).causes()
    (cause,) = store.known()
    assert cause.check == ""
    assert [x.name for x in cause.hard] == ["column stride of k"]


def test_outputs_that_a_cause_of_every_problem_leaves_right_have_another_cause():
    """The gradient of v is wrong in every call, and out is where N > 16."""

    def fault(out, q, k, v):
        return out * (1 + (k.shape[2] > 16)) + (v - v.detach()).mean(2, keepdim=True)

    runner, store = runner_with(fault, dtypes=("fp32",)), Known()
    (gradient,) = causes_of(runner, Problem(M=3, N=5), store)
    assert gradient.outputs == ("dv",)
    causes_of(runner, Problem(M=3, N=20, dout="zero"), store)
    _, cause = store.known()
    assert cause.features == (Feature("N above", 16),)
    # A failure of both has both.
    found = runner.findings(Problem(M=2, N=30), accuracy)
    assert sorted(Failure(runner, accuracy, found, store).causes()) == [1, 2]


def test_declarations_of_gradients_explain_no_wrong_out(monkeypatch):
    """A wider bound of every P would let the failures pass."""
    monkeypatch.setattr(declaring, "_passes", lambda subject, claim, problems: True)
    runner = runner_of()
    for outputs, offered in ((("out",), False), (("dk", "out"), False), (("dk",), True)):
        found = declaring.declarations_that_fit(runner, accuracy, [Problem()], (), outputs)
        assert ("ds_roundings=2" in found) == offered
        assert "p_dtype" in "".join(found)


def the_order_of_the_call_before_is_the_cause(runner, fresh):
    """Assert that wrong strides of k are traced to a call with others, which a process may run."""
    store = Known()
    problem = Problem(M=3, N=5, layouts=("bhsd", "transposed", "bhsd", "bhsd"))
    found = runner.findings(problem, claims.layout)
    Failure(runner, claims.layout, found, store, fresh).causes()
    (cause,) = store.known()
    assert [x.layouts[1] for x in cause.after] == ["bhsd"]
    assert cause.depends_on == "earlier calls"


def test_strides_that_fail_after_others_are_a_matter_of_the_call_before():
    """The kernel keeps the order of the first axes of k, which the check of strides changes."""

    def kept_order():
        order = []

        def fault(out, q, k, v):
            order.append(k.stride(-2) < k.stride(-1))
            return out * (1 + (order[0] != order[-1]))

        return runner_with(fault, dtypes=("fp32",), backward=False)

    def fresh(calls, name):
        anew = kept_order()
        return [not anew.findings(call, accuracy) for call in calls]

    runner = kept_order()
    the_order_of_the_call_before_is_the_cause(runner, fresh)


def test_strides_that_fail_after_an_earlier_call_of_the_run_are_a_matter_of_it():
    """The call itself fails in this process, and the check's copies in a fresh one."""

    def kept_order():
        order = {}

        def fault(out, q, k, v):
            adjacent = k.stride(-2) < k.stride(-1)
            return out * (1 + (order.setdefault(k.shape, adjacent) != adjacent))

        return runner_with(fault, dtypes=("fp32",), backward=False)

    def fresh(calls, name):
        check = next((x.check for x in claims.CLAIMS if x.name == name), accuracy)
        anew = kept_order()
        return [not anew.findings(call, check) for call in calls]

    runner = kept_order()
    for N in range(1, 6):
        assert not runner.findings(Problem(N=N), accuracy)
    the_order_of_the_call_before_is_the_cause(runner, fresh)


def test_a_check_of_many_calls_fails_by_the_chance_of_one():
    calls = []

    def fault(out, q, k, v):
        calls.append(out)
        return out * (1 + len(calls) % 2)

    (cause,) = causes_of(runner_with(fault, dtypes=("fp32",)), Problem(M=3, N=5), Known())
    assert 0 < cause.runs[0] < cause.runs[1]
    state = dataclasses.replace(cause, guarantee="G13", runs=None, problem=Problem())
    for both in ((cause, state), (state, cause)):
        store = Known()
        for one in both:
            store.add(one)
        (joined,) = store.known()
        assert (joined.runs, joined.guarantee) == (cause.runs, cause.guarantee)
    # A sequence that fails in a fresh process, and a call that fails in no further run, tell less.
    assert not cause.covers(dataclasses.replace(state, after=(Problem(),)))
    assert not dataclasses.replace(cause, runs=(0, 9)).covers(state)


def test_an_output_that_is_wrong_beside_another_fault_is_not_of_a_dtype():
    """dv is wrong in fp16, dk for Dv other than D, and out where both are so."""

    def fault(out, q, k, v):
        other, half = k.shape[3] != v.shape[3], q.dtype == torch.float16
        out = out + half * (v - v.detach()).mean(2, keepdim=True)
        out = out + other * (k - k.detach()).mean((2, 3), keepdim=True)
        return out + (other and half) * out.detach()

    runner, store = runner_with(fault, dtypes=("fp16", "fp32")), Known()
    causes_of(runner, Problem(M=3, N=5, dtype="fp16"), store)
    causes_of(runner, Problem(M=2, N=3, Dv=8, dtype="fp16"), store)
    (of_dtype,) = (x for x in store.known() if [y.name for y in x.features] == ["dtype"])
    assert of_dtype.outputs == ("dv",)


def test_a_call_that_passes_after_the_search_needs_no_feature():
    """Its first runs all fail, by chance."""
    calls = []

    def fault(out, q, k, v):
        calls.append(out)
        return out * (1 + (len(calls) < 6))

    (cause,) = causes_of(runner_with(fault, dtypes=("fp32",)), Problem(M=3, N=5), Known())
    assert cause.depends_on == "chance"
    assert not cause.features
    failing, of = cause.runs
    assert failing < of == 9
