"""The verdict of a run: its lines, and that processes share the causes behind it."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.search.causes import RootCause
from fa_verify.pytest_plugin.causes.confirming import confirmed
from fa_verify.pytest_plugin.causes.shared import Shared
from fa_verify.reporting.statuses import Counts
from fa_verify.reporting.verdict import (
    behaves_as,
    evidence,
    explained,
    if_intended,
    title,
    verdict,
)
from tests.unit.fa_verify.reporting.gate.test_gate import runs

# Two defects: softmax of rows without a key, and dk and dv of grouped heads rounded too early.
KERNEL = """
import torch

def attention(q, k, v, *, mask, sm_scale):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    seen = mask.dense(*q.shape[:3], k.shape[2])
    scores = (q.float() @ k.mT * sm_scale).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).to(q.dtype)

attention.p_dtype, attention.p_normalised = "fp32", True
attention.dtypes = ("fp16", "bf16", "fp32")
attention.dirty = ("zero", "noise")
"""
NAN = RootCause(
    number=1, kind="NaN", features=(Feature("empty rows"),), outputs=("out", "dv"),
    dtypes=("fp16", "fp32"), all_dtypes=True, guarantee="G1 accuracy",
    told="G1 accuracy: out of attention leaves the derived bound",
    replay="fa-verify explain --kernel=a.py:f "
    """'{"version":1,"M":2,"mask":{"type":"Mask","causal":true}}'""",
    problem=Problem(M=2, mask=Mask(causal=True)), passing=Problem(M=1, mask=Mask(causal=True)),
    every=True,
    finding={"got": "nan", "want": "0.0", "bound": "0.0", "output": "out", "where": "b=0",
             "claim": "differs"},
)  # fmt: skip


def test_the_verdict_names_causes_and_what_they_explain():
    reasons = {"attention declares no pooled": 3, "needs tensors of 4 GiB": 1,
               "needs tensors of 8 GiB": 1}  # fmt: skip
    lines = [
        *verdict("a.py:f", Counts(3, 2, reasons), explained([NAN], {1: ["a", "b"]}, {"c": "E"}))
    ]
    assert lines[0] == (
        "a.py:f  FAILED  2 causes, 5 checks: 3 failed, 2 hold, 5 not asked (2 reasons)"
    )
    assert lines[2] == "1  Rows that see no key give NaN    explains 2 of 3 failures"
    assert lines[3:7] == [
        "   out, dv; every dtype; needs rows that see no key",
        "   smallest: M=2 N=1 fp32 causal    fa-verify explain --kernel=a.py:f "
        """'{"version":1,"M":2,"mask":{"type":"Mask","causal":true}}'""",
        "   passes with M=1",
        "",
    ]
    assert lines[7:] == ["2  E    explains 1 of 3 failures", "   in c"]


def many_causes(count):
    """A run with so many causes of six lines each, and as many failures without a cause."""
    causes = [dataclasses.replace(NAN, number=i) for i in range(1, count + 1)]
    others = {
        f"t{'x' * i}": f"{'word ' * 99}{'y' * i}\n  replay: r\n  replay: s" for i in range(count)
    }
    return explained(causes, {i: ["a"] * (99 - i) for i in range(1, count + 1)}, others)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 40])
def test_a_verdict_fits_a_screen_and_no_cause_is_lost(count):
    found = many_causes(count)
    lines = [*verdict("f", Counts(99, 0, {}), found)]
    assert len(lines) <= 27
    assert lines[2] == "1  Rows that see no key give NaN    explains 98 of 99 failures"
    named = [int(x.split()[0]) for x in lines if re.match(r"\d+ ", x) and "explains" in x]
    rest = [int(x.split()[0]) for x in lines if x.endswith("other causes")]
    assert named == [*range(1, len(named) + 1)]
    assert len(named) + sum(rest) == len(found) == 2 * count
    # A cause in one line has the command that shows its smallest problem.
    short = [x for x in lines if "NaN" in x and "fa-verify explain" in x]
    assert bool(short) == (count > 3)
    assert all(len(x) < 300 for x in lines)
    in_full = [*verdict("f", Counts(99, 0, {}), found, full=True)]
    assert sum("explains" in x for x in in_full) == 2 * count


def test_a_run_without_failures_holds_and_one_without_checks_is_not_verified():
    for hold, said in ((2, "2 checks hold"), (1, "1 check holds")):
        (line,) = verdict("f", Counts(0, hold, {}, judged=1), [])
        assert line == f"f  HOLDS  {said}, 0 not asked"
    missing = {"head_dims": "72, 112", "gqa": ""}
    (line,) = verdict("f", Counts(0, 2, {}, judged=1, not_drawn=missing), [])
    assert line == "f  HOLDS  2 checks hold, 0 not asked; not drawn: head_dims 72, 112; gqa"
    line, *_ = verdict("f", Counts(3, 1, {}), [])
    assert line == "f  FAILED  0 causes, 4 checks: 3 failed, 1 holds, 0 not asked"
    (line,) = verdict("f", Counts(0, 0, {"no GPU": 4}), [])
    assert line.startswith("f  NOT VERIFIED")
    reasons = {"cannot run on a CPU: inline assembly": 1}
    (line,) = verdict("f", Counts(0, 9, reasons, judged=1), [])
    assert line == (
        "f  NOT VERIFIED  some problems cannot run on a CPU; 9 checks hold, 1 not asked (1 reason)"
    )


def test_a_run_that_an_assumption_narrows_does_not_hold():
    (line,) = verdict("f", Counts(0, 2, {}, judged=1, assumed=("always causal",)), [])
    assert line == (
        "f  NOT VERIFIED  holds for always causal (assumed: declare it to make it a promise); "
        "2 checks hold, 0 not asked"
    )
    (line,) = verdict("f", Counts(0, 2, {}, judged=1, assumed=("always causal", "no fp64")), [])
    assert "for always causal, no fp64 (assumed: declare them to make them promises)" in line
    (line, *_) = verdict("f", Counts(1, 2, {}, judged=1, assumed=("always causal",)), [])
    assert line.startswith("f  FAILED")


@pytest.mark.parametrize(
    ("features", "said", "declared"),
    [
        ((), "Every problem gives NaN", ""),
        ((Feature("zero size"),), "Sizes of 0 give NaN", "zero_sizes=False"),
        ((Feature("M > N"),), "Problems of M > N give NaN", "m_ne_n=False"),
        # The declaration would exclude problems that pass.
        ((Feature("M > N"), Feature("causal")),
         "Problems of M > N give NaN, with a causal mask", ""),
        ((Feature("N above", 16),), "Problems with N > 16 give NaN", ""),
        ((Feature("N above", 16), Feature("N up to", 31)),
         "Problems with N > 16 give NaN, with N <= 31", ""),
        ((Feature("D is 112"),), "Problems with D = 112 give NaN", ""),
        ((Feature("M or N is no multiple of 32"),),
         "Problems with M or N not a multiple of 32 give NaN", ""),
    ],
)  # fmt: skip
def test_titles_and_declarations_follow_from_features(features, said, declared):
    cause = RootCause(**{**vars(NAN), "features": features})
    assert title(cause) == said
    assert if_intended(cause) == declared


def test_a_title_of_every_problem_has_a_verb_in_the_singular():
    cause = RootCause(**{**vars(NAN), "kind": "form: out has shape (1,)", "features": ()})
    assert title(cause) == "Every problem fails: out has shape (1,)"


def test_a_title_names_the_other_call_of_a_check():
    """The problem itself passes: the check changes its strides, or values of hidden keys."""
    features = (Feature("B above", 1),)
    fields = {**vars(NAN), "guarantee": "G1 accuracy", "check": "G12", "features": features}
    said = "Offsets past 2**31 elements give NaN, with B > 1"
    assert title(RootCause(**fields)) == said
    assert title(RootCause(**{**fields, "features": ()})) == said.removesuffix(", with B > 1")
    features = (Feature("dtype", ("bf16",)), Feature("M above", 1))
    fields |= {
        "guarantee": "G5 hidden positions",
        "check": "",
        "features": features,
        "all_dtypes": False,
    }
    assert title(RootCause(**fields)).startswith("Values in hidden keys and rows give NaN, with ")


def test_every_problem_is_said_only_if_none_passed():
    fields = {**vars(NAN), "features": ()}
    assert title(RootCause(**fields)) == "Every problem gives NaN"
    one = RootCause(**{**fields, "every": False})
    assert title(one) == "Some problems give NaN"
    assert "other problems pass, and no feature tells them apart" in evidence(one)


@pytest.mark.parametrize(
    ("got", "share"),
    [(3.0, "50"), (4.25, "110"), (2000.0, "100,000"), (2.00002, "0.001"), (3.9999, "100")],
)
def test_the_share_of_an_error_is_a_number_without_an_exponent(got, share):
    finding = {**NAN.finding, "got": got, "want": 2.0, "bound": 0.5}
    one = dataclasses.replace(NAN, kind="error", finding=finding)
    assert f" x bound, {share} % of out" in evidence(one)


def test_calls_that_depend_on_chance_or_others_have_titles_of_their_own():
    fields = {**vars(NAN), "features": (), "kind": "error"}
    sometimes = RootCause(**{**fields, "runs": (2, 9)})
    assert title(sometimes) == (
        "One problem fails 2 of 9 times with the same inputs: wrong out, dv"
    )
    late = RootCause(**{**fields, "after": (Problem(M=3),)})
    assert title(late) == "Some problems give wrong out, dv, only after other calls"
    assert "only after M=3 N=1 fp32" in evidence(late)
    assert not if_intended(sometimes)
    assert not if_intended(late)
    other = RootCause(**{**fields, "guarantee": "G8 layout", "check": "G8"})
    assert title(other) == "Out differs"
    for cause in (sometimes, late, other):
        assert RootCause.of(json.loads(json.dumps(cause.record()))) == cause


def test_what_was_not_tried_is_said():
    cause = RootCause(**{**vars(NAN), "untried": ("bf16", "causal")})
    assert "fp16, fp32; " in evidence(cause)
    assert "not tried: bf16, causal" in evidence(cause)
    many = RootCause(**{**vars(NAN), "untried": ("a", "b", "c")})
    assert "not tried: 3 features" in evidence(many)


def test_the_verdict_names_the_fault_with_its_evidence():
    one = {
        "name": "top left",
        "says": "positions were aligned to the top left",
        "place": "dq",
        "tile": "",
        "on_record": "a#1; b#2; c#3; d#4",
        "elements": 1200,
        "problems": 3,
        "outputs": [],
    }
    two = {**one, "says": "half were lost", "place": "everywhere", "on_record": "",
           "tile": "tiles of 16 keys"}  # fmt: skip
    named = {"explanations": [one], "tried": 30, "complete": True, "seconds": 0.5}
    cause = RootCause(**{**vars(NAN), "diagnosis": named})
    assert [*behaves_as(cause)] == [
        "behaves as if positions were aligned to the top left (in dq, on record: a#1; b#2; c#3)",
        "   1,200 of 1,200 wrong elements of 3 problems agree, "
        "the results of 29 other faults do not",
    ]
    lines = [*verdict("f", Counts(1, 0, {}), explained([cause], {1: ["a"]}, {}))]
    assert lines[-1].strip().startswith("1,200 of 1,200")
    several = RootCause(**{**vars(NAN), "diagnosis": {**named, "explanations": [one, two]}})
    found = [*behaves_as(several)]
    assert found[1] == "or as if half were lost (tiles of 16 keys)"
    assert found[2].endswith("28 other faults do not; no supported problem tells them apart")
    parts = [{**one, "outputs": ["out", "lse"]}, {**one, "outputs": ["dq"]}]
    partly = RootCause(**{**vars(NAN), "diagnosis": {**named, "explanations": parts}})
    lines = [*behaves_as(partly)]
    assert lines[1] == (
        "   1,200 of 1,200 wrong elements of out and lse in 3 problems agree, the results of 29 "
        "other faults do not; other outputs are wrong in another way"
    )
    assert lines[2].startswith("behaves as if")
    assert not [*behaves_as(NAN)]
    assert RootCause.of(json.loads(json.dumps(cause.record()))).diagnosis == named


def test_processes_share_causes_and_join_parts_of_one(tmp_path):
    one, other = Shared(tmp_path), Shared(tmp_path)
    narrow = RootCause(**{**vars(NAN), "features": (Feature("empty rows"), Feature("causal"))})
    first = one.add(narrow)
    assert other.known() == [RootCause(**{**vars(narrow), "number": first})]
    second = other.add(NAN)
    assert [x.number for x in one.known()] == [second]
    assert one.number(first) == second
    assert one.add(narrow) == second


def test_exceptions_of_one_line_are_joined_if_they_share_a_feature(tmp_path):
    store, fields = Shared(tmp_path), {**vars(NAN), "kind": "raises IndexError at a.py:3"}
    number = store.add(RootCause(**fields))
    features = (Feature("empty rows"), Feature("dtype", ("fp16",)))
    assert store.add(RootCause(**{**fields, "features": features})) == number
    elsewhere = {**fields, "features": features, "kind": "raises IndexError at a.py:4"}
    assert store.add(RootCause(**elsewhere)) != number
    assert store.add(RootCause(**{**fields, "features": (Feature("zero size"),)})) != number


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The output of a run with workers and of one that stops, on the kernel above."""
    folder = tmp_path_factory.mktemp("verdict")
    (folder / "kernels.py").write_text(KERNEL)
    kernel = f"--kernel={folder}/kernels.py:attention"
    few = [kernel, "tests/conformance/test_claims.py", "-k", "element_lies and d16"]
    return runs([*few, "-n", "2"], [*few, "-x"])


def test_a_kernel_with_two_defects_has_two_causes(said):
    (text, code), _ = said
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "  FAILED  2 causes, " in text
    assert "Rows that see no key give NaN" in text
    assert "behaves as if rows that have seen no key subtracted -inf from -inf" in text
    assert 'if intended, declare group_sum="dtype"' in text
    assert re.search(r"drew again, without these causes: [\d,]+ problems, no other cause", text)
    # Every failure is explained, and none is printed at length.
    failed = int(re.search(r"(\d+) failed", text)[1])
    parts = re.findall(rf"explains (\d+) of {failed} failures?", text)
    assert sum(map(int, parts)) >= failed > 2
    assert "Violation" not in text


def test_x_stops_after_the_first_cause(said):
    _, (text, code) = said
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "  FAILED  1 cause, 1 check: 1 failed" in text


def test_causes_that_explain_no_failure_are_left_out():
    other = dataclasses.replace(NAN, number=2)
    assert [x.cause for x in explained([NAN, other], {2: ["a"]}, {})] == [other]
    # Where none does, as after the death of a process, all are shown.
    assert [x.cause for x in explained([NAN, other], {}, {"a": "E"})][:2] == [NAN, other]


P = 'p_dtype="input"'


@pytest.mark.parametrize(
    ("offered", "answers", "outputs", "kept"),
    [
        # A probe finds one of them.
        ((P, "p_normalised=True"), {"p_dtype": "input"}, ("dq",), (P,)),
        ((P,), {"p_dtype": "fp32"}, ("dq",), ()),
        # The backward rounds P, which leaves out as it is.
        ((P,), {"p_dtype": "input", "p_dtype_of_out": "fp32"}, ("out", "lse"), ()),
        ((P,), {"p_dtype": "fp32", "p_dtype_of_out": "input"}, ("out",), (P,)),
        # A probe finds none, and nothing tells three apart.
        ((P,), {}, ("out",), (P,)),
        ((P, "p_normalised=True"), {}, ("out",), (P, "p_normalised=True")),
        (('prescales="q"', 'prescales="k"', 'prescales="qk"'), {"p_dtype": "fp32"}, ("out",), ()),
    ],
)
def test_declarations_are_offered_if_a_probe_finds_them_or_no_other_fits(
    offered, answers, outputs, kept
):
    assert confirmed(offered, answers, outputs) == kept


def test_two_declarations_are_offered_as_two():
    cause = dataclasses.replace(NAN, declarations=("a=1", "b=2"))
    assert if_intended(cause) == "a=1 or b=2, which nothing that was tried tells apart"
    assert if_intended(dataclasses.replace(NAN, declarations=("a=1",))) == "a=1"
