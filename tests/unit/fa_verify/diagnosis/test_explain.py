"""A diagnosis names planted faults, and nothing where no fault of the dictionary fits."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from fa_verify.diagnosis.explain import diagnose
from fa_verify.diagnosis.named.entries import DICTIONARY, variants
from fa_verify.diagnosis.named.passes import Case
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

CAUSAL = Mask(causal=True)
PADDED = Mask(causal=True, window_left=9, seqlens_q=(20, 11), seqlens_k=(18, 25))
FULL = Problem(
    B=2, H=4, Hk=2, M=20, N=25, D=5, Dv=3, dtype="fp64", mask=PADDED, dlse="normal", softcap=2.0,
    alibi="normal", bias="normal/bhmn", dirty="nan",
)  # fmt: skip


def subject_of(fault: str, **declared: object) -> Subject:
    """Attention in float64 with a planted fault."""

    def attention(q, k, v, *, mask, sm_scale):
        groups = q.shape[1] // k.shape[1]
        seen = mask.dense(*q.shape[:3], k.shape[2])
        if fault == "unmasked":
            seen = torch.ones_like(seen)
        if fault == "top left" and mask.causal:
            seen = torch.ones_like(seen).tril()
        if fault == "one distance" and mask.right is not None:
            # The diagonal of the top left corner stands for all pairs.
            left = math.inf if mask.window_left is None else mask.window_left
            inside = -left <= q.shape[2] - k.shape[2] <= mask.right
            seen = torch.full_like(seen, inside)
        k, v = (x.double() for x in (k, v))
        if fault == "interleaved":
            k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q.double() @ k.mT * (sm_scale**2 if fault == "scaled twice" else sm_scale)
        weights = scores.masked_fill(~seen, -1e9 if fault == "finite" else -math.inf).softmax(3)
        if fault not in ("finite", "unguarded"):
            weights = torch.where(seen, weights, 0.0)
        if fault == "tail":
            last = torch.arange(k.shape[2]) >= k.shape[2] // 16 * 16
            weights = weights * (1.0 + last)
            weights = weights / weights.sum(3, keepdim=True).clamp(min=1e-300)
        if fault == "fewer keys than rows" and mask.seqlens_k is not None:
            if q.shape[0] > 4:
                raise NotImplementedError("more than four sequences")
            rows, keys = (
                torch.tensor(x).view(-1, 1, 1, 1) for x in mask.lengths(*q.shape[:3:2], k.shape[2])
            )
            weights = torch.where(rows > keys, 0.0 * weights, weights)
        if fault == "raises":
            raise RuntimeError("no")
        if fault == "unknown":
            weights = weights**1.01
        return (weights @ v).to(q.dtype)

    for name, value in {"p_dtype": "fp32", "p_normalised": True, **declared}.items():
        setattr(attention, name, value)
    return Subject.of(attention, "attention")


@pytest.mark.parametrize(
    "problem",
    [FULL, Problem(N=0, M=3), Problem(M=0, N=3), Problem(M=5, N=3, mask=CAUSAL, dtype="fp16"),
     Problem(M=9, N=7, mask=PrefixLM(prefix=3), dtype="fp64"),
     Problem(H=2, M=9, N=7, mask=Mask(causal=True, seqlens_q=(8,)), sinks="some_absent"),
     Problem(N=0, M=3, sinks="ordinary")],
    ids=["full", "no keys", "no rows", "empty rows", "predicate", "sinks", "sinks alone"],
)  # fmt: skip
def test_correct_passes_compute_what_the_oracle_does(problem):
    inputs = make(problem)
    want = torch_reference.attention(
        *inputs, mask=problem.mask, sm_scale=problem.scale, softcap=problem.softcap
    )
    for got, right in zip(Case(problem, inputs).right.values, want, strict=True):
        assert torch.equal(got.isfinite(), right.isfinite())
        assert ((got - right).abs() <= 1e-13).logical_or(got == right).all()


def test_every_variant_runs_on_any_problem_and_half_of_the_faults_show():
    shown = set()
    small = dataclasses.replace(FULL, M=7, N=9, mask=Mask(causal=True, seqlens_k=(9, 3)))
    for problem in (small, dataclasses.replace(FULL, M=9, mask=CAUSAL, B=1), Problem(M=2, N=0)):
        case = Case(problem, make(problem))
        for variant in variants(((16, 16), (32, 16))):
            if variant(case) is not None:
                shown.add(variant.named.name)
    assert len(shown) > len(DICTIONARY) / 2


def test_names_of_entries_differ():
    names = [x.name for x in DICTIONARY]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("fault", "problem", "name", "shipped"),
    [
        ("interleaved", Problem(H=4, Hk=2, M=2, N=1), "interleaved heads", ""),
        ("top left", Problem(M=1, N=2, mask=CAUSAL), "top left", "flash-attention#282"),
        ("finite", Problem(M=2, N=1, mask=CAUSAL, dtype="fp16"), "finite mask", "lattice#361"),
        ("tail", Problem(N=19), "tail twice", ""),
        ("scaled twice", Problem(N=2, dtype="bf16"), "scaled twice", ""),
    ],
)
def test_a_planted_fault_is_named_with_its_evidence(fault, problem, name, shipped):
    found = diagnose(subject_of(fault), problem)
    assert [x.name for x in found.explanations] == [name]
    (explanation,) = found.explanations
    assert shipped in explanation.on_record
    assert explanation.elements > 2
    assert explanation.problems > 2
    assert found.complete
    json.dumps(found.record())


@pytest.mark.parametrize(
    ("fault", "name"),
    [("no slope of a softcap", "no slope of the softcap"), ("lse in base 2", "lse base 2"),
     ("ALiBi from the first key", "ALiBi from the own index"), ("out scaled", "constant factor"),
     ("lse of empty rows is 0", "empty lse 0"), ("no sink", "no sink")],
)  # fmt: skip
def test_faults_of_a_subject_in_pytorch_are_named(fault, name):
    eager = Eager(fault)
    eager.score_mods = ("softcap", "alibi", "bias", "sinks")
    problem = {
        "no slope of a softcap": Problem(M=9, N=9, softcap=2.0, dtype="fp64"),
        "no sink": Problem(M=5, N=9, H=2, sinks="ordinary", dtype="fp64"),
        "ALiBi from the first key": Problem(M=5, N=9, alibi="normal", dtype="fp64"),
    }.get(fault, Problem(M=5, N=3, mask=CAUSAL, dtype="fp64"))
    found = diagnose(Subject.of(eager, fault), problem)
    assert [x.name for x in found.explanations] == [name]


def test_no_tail_is_named_where_every_row_is_lost():
    """All rows lie in the ragged tile of a kernel with tiles of more rows."""
    lost = Subject.of(Eager("reads past the end"), "lost")
    assert diagnose(lost, Problem()).explanations == ()


@pytest.mark.parametrize("fault", ["", "unknown", "raises"])
def test_nothing_is_named_where_nothing_agrees(fault):
    assert diagnose(subject_of(fault), Problem(M=5, N=9)).explanations == ()


@pytest.mark.parametrize(("M", "N"), [(37, 21), (150, 150)])
def test_no_tile_is_named_that_only_short_sequences_agree_with(M, N):
    """A tile of 64 keys holds a sequence of 21, however much padding follows."""
    short = Mask(causal=True, seqlens_q=(37, 0, 3, 20), seqlens_k=(20, 5, 0, 21))
    problem = Problem(B=4, H=2, M=M, N=N, D=5, Dv=3, mask=short, dtype="fp64")
    assert diagnose(subject_of("fewer keys than rows"), problem).explanations == ()


def test_faults_that_no_supported_problem_tells_apart_are_both_listed():
    found = diagnose(subject_of("unmasked", masks=("causal",)), Problem(N=2, M=2, mask=CAUSAL))
    names = [x.name for x in found.explanations]
    assert names == ["right edge ignored", "mask ignored"]
    # A window tells them apart.
    found = diagnose(subject_of("unmasked"), Problem(N=2, M=2, mask=CAUSAL))
    assert [x.name for x in found.explanations] == ["mask ignored"]


@pytest.mark.parametrize(
    ("masks", "names"), [(("causal", "window"), []), (("causal",), ["right edge ignored"])]
)
def test_no_mask_is_called_ignored_that_hides_other_keys_of_a_window(masks, names):
    """One distance for all pairs hides nothing where N >= M, unless a window is shorter."""
    found = diagnose(subject_of("one distance", masks=masks), Problem(N=2, M=2, mask=CAUSAL))
    assert [x.name for x in found.explanations][:1] == names
    assert found.complete


def test_a_search_out_of_time_names_nothing():
    found = diagnose(subject_of("top left"), Problem(M=1, N=2, mask=CAUSAL), seconds=0.0)
    assert (found.explanations, found.complete) == ((), False)


def test_an_unguarded_softmax_in_pytorch_is_named():
    problem = Problem(M=2, N=1, mask=CAUSAL)
    found = diagnose(subject_of("unguarded"), problem)
    assert [x.name for x in found.explanations] == ["unguarded rows"]


def test_faulty_results_are_computed_on_the_cpu_whatever_the_device_of_the_subject():
    """The problems name a GPU, and the tensors, made elsewhere, meet none of its tensors."""

    def run(problem):
        trial = run_trial(subject, dataclasses.replace(problem, device="cpu"))
        return dataclasses.replace(trial, problem=problem)

    subject = subject_of("top left")
    problem = Problem(M=1, N=2, mask=CAUSAL, device="cuda")
    found = diagnose(subject, problem, run=run)
    assert [x.name for x in found.explanations] == ["top left"]
