"""The labels are true: each kernel fails and holds on the problems that prove its label."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from fa_verify import verify
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.masks.mask import Mask
from tests.mutation.harness.sites import rate_interval
from tests.planted.__main__ import conditions, judged, labels, recorded, table

FOLDER = Path(__file__).parent / "faults"
LABELS = {label["kernel"]: label for label in labels()}
# Their kernels are Triton's, or lie beside one.
IN_TRITON = ("tiled_attention", "tiles", "paged_attention", "caches", "right")
SHARED = ("plain_attention", "tiled_attention", "paged_attention", "right")


@pytest.fixture
def loaded(monkeypatch):
    """Return a function that loads a kernel, without what earlier calls left in it."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(kernel):
        file, name = kernel.split(".py:")
        if file in IN_TRITON:
            pytest.importorskip("triton")
            if os.environ.get("TRITON_INTERPRET") != "1":
                pytest.skip("needs Triton's interpreter, for tensors on the CPU")
        sys.modules.pop(file, None)
        return getattr(importlib.import_module(file), name)

    return load


def report(kernel, problems, guarantees=None):
    guarantees = guarantees or ["S1" if "merge" in problems[0] else "G1"]
    return verify(kernel, problems=[call_from_json(x) for x in problems], guarantees=guarantees)


def cases(key):
    return [name for name, label in LABELS.items() if label.get(key) and "after" not in label]


@pytest.mark.parametrize("kernel", cases("fails"))
def test_a_kernel_fails_in_the_outputs_of_its_label(kernel, loaded):
    label = LABELS[kernel]
    allowed = {*label["outputs"], *label.get("second", {}).get("outputs", ())}
    for problem in label["fails"]:
        findings = report(loaded(kernel), [problem], label.get("guarantees")).findings
        assert findings, problem
        wrong = {x.output for x in findings if x.output}
        assert not allowed or wrong <= allowed, problem


@pytest.mark.parametrize("kernel", cases("holds"))
def test_a_kernel_holds_without_one_of_its_conditions(kernel, loaded):
    verdict = report(loaded(kernel), LABELS[kernel]["holds"])
    assert verdict, str(verdict)
    assert verdict.judged == len(LABELS[kernel]["holds"])


@pytest.mark.parametrize("kernel", [name for name, label in LABELS.items() if "after" in label])
def test_a_kernel_fails_only_after_another_call(kernel, loaded):
    label = LABELS[kernel]
    assert report(loaded(kernel), label["fails"])
    used = loaded(kernel)
    assert report(used, [label["after"]])
    assert report(used, label["fails"]).findings


@pytest.mark.parametrize("kernel", [name for name, label in LABELS.items() if "sometimes" in label])
def test_a_kernel_fails_in_some_calls(kernel, loaded):
    inputs = [torch.ones(1, 1, 2, 4) for _ in range(3)]
    used = loaded(kernel)
    outs = [used(*inputs, mask=Mask(), sm_scale=0.5)[0] for _ in range(80)]
    right = sum(torch.equal(out, torch.ones_like(out)) for out in outs)
    assert 30 < right < 80


def test_a_kernel_hangs_past_40_keys(loaded):
    def end(*_):
        raise TimeoutError

    used = loaded("calls.py:HangsPast40")
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 41, 4)
    used(q, k[:, :, :40], k[:, :, :40], mask=Mask(), sm_scale=0.5)
    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError):
            used(q, k, k, mask=Mask(), sm_scale=0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


RIGHT = {
    "Plain": [
        '{"version":1,"B":2,"H":4,"Hk":2,"M":5,"N":3,"mask":{"type":"Mask","causal":true},'
        '"dlse":"normal","softcap":2.0,"bias":"normal/mn","alibi":"normal","sinks":"ordinary"}',
    ],
    "TiledBackward": [
        '{"version":1,"H":2,"M":17,"N":19,"mask":{"type":"Mask","causal":true,"window_left":5}}',
    ],
    "Tiled": ['{"version":1,"H":2,"M":17,"N":40,"mask":{"type":"Mask","seqlens_k":[33]}}'],
    "Paged": [
        '{"version":1,"M":2,"N":9,"mask":{"type":"Mask","causal":true,"seqlens_k":[9]},'
        '"cache":{"page_size":4,"new":2}}',
    ],
    "Decoding": [
        '{"version":1,"H":9,"N":9,"mask":{"type":"Mask","seqlens_k":[9]},"cache":{"page_size":4}}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_parts_hold(name, loaded):
    verdict = report(loaded(f"right.py:{name}"), RIGHT[name])
    assert verdict, str(verdict)


def test_every_kernel_has_a_label():
    named = set()
    for file in FOLDER.glob("*.py"):
        if file.stem not in SHARED:
            text = file.read_text()
            found = re.findall(
                r"^(?:class (\w+)\(Attention\)|([A-Z]\w+) = (?:tiled|paged|decode)\()", text, re.M
            )
            found += re.findall(r"^@merges\ndef (\w+)()", text, re.M)
            named |= {f"{file.name}:{one or other}" for one, other in found}
    assert named - {"merges.py:right"} == set(LABELS)


def test_each_label_has_its_keys():
    for name, label in LABELS.items():
        for key in ("source", "why", "needs", "outputs", "dtypes", "declaration"):
            assert key in label, f"{name} has no {key}"
        assert label["dtypes"], name


CAUSE = {
    "depends_on": "",
    "title": "Problems with N > 17 and grouped heads give wrong out",
    "evidence": "out; every dtype; needs N > 17, grouped heads; error 3 x bound, 2.9 % of out",
    "outputs": ["out"], "dtypes": ["fp32"], "declarations": [],
}  # fmt: skip
TRUTH = {
    "needs": [["grouped heads", "H > 1"], "N > 17"], "outputs": ["out", "lse"],
    "dtypes": ["fp32"], "declaration": "",
}  # fmt: skip
ALL = dict.fromkeys(("title", "threshold", "dtypes", "declaration"), True)


def test_the_conditions_of_a_cause_are_read():
    assert conditions(CAUSE) == ["N > 17", "grouped heads"]
    often = {"title": "Fails 2 of 9 times, with ragged lengths", "evidence": "out; fp32"}
    assert conditions(often) == ["fails 2 of 9", "ragged"]
    assert conditions(often | {"evidence": "out; needs ragged lengths"}) == [
        "ragged lengths",
        "fails 2 of 9",
    ]


@pytest.mark.parametrize(
    ("cause", "truth", "false"),
    [
        ({}, {}, ()),
        ({}, {"needs": ["grouped heads", "N > 16"]}, ("threshold",)),
        ({}, {"needs": ["grouped heads"]}, ("title",)),
        ({}, {"needs": ["grouped heads"], "allowed": ["N > 17"]}, ()),
        ({}, {"needs": [*TRUTH["needs"], "ALiBi"]}, ("title",)),
        ({}, {"outputs": ["lse"]}, ("title",)),
        ({"title": "Every problem gives wrong out"}, {}, ("title",)),
        ({"title": "Every problem gives wrong out"}, {"every": True}, ()),
        ({"dtypes": ["fp16"]}, {}, ("dtypes",)),
        ({"declarations": ["lse_base='2'"]}, {}, ("declaration",)),
        ({"declarations": ["lse_base='2'"]}, {"declaration": "lse_base='2'"}, ()),
        ({}, {"declaration": "lse_base='2'"}, ("declaration",)),
        ({"declarations": ["gqa=False"]}, {"may_declare": ["gqa=False"]}, ()),
    ],
)
def test_a_cause_is_compared_with_the_truth(cause, truth, false):
    assert judged(CAUSE | cause, TRUTH | truth) == ALL | dict.fromkeys(false, False)


def test_the_table_counts_faults_and_false_sentences():
    row = {"kernel": "a.py:b", **ALL, "seconds": 1, "end": "status 1", "false": 0, "titles": []}
    lines = list(table([row, row | {"title": False, "false": 2}]))
    assert lines[-1] == "all is true of 1 of 2 faults, 50% [9%, 91%]; 2 false sentences"
    assert rate_interval(0, 10)[0] == pytest.approx(0.0)


def test_what_a_death_needs_is_compared_too():
    message = (
        "Problems with N > 40 do not return within 5 s (hang)\n  needs N > 40\n  smallest: N=41"
    )
    cause = recorded({"title": message.partition("\n")[0], "message": message})
    assert all(judged(cause, LABELS["calls.py:HangsPast40"]).values())
    cause = recorded({"title": "t", "message": message.replace("40", "8")})
    assert not judged(cause, LABELS["calls.py:HangsPast40"])["threshold"]
