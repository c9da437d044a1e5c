"""The checks of streams and graphs on a CPU, with stand-ins for both, find planted faults."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import streams
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

PROBLEM = Problem(M=5, N=7, dtype="fp64", seed=1)
PREDICATE = Problem(M=5, N=7, dtype="fp64", mask=PrefixLM(prefix=2))


class Graph:
    """A stand-in for a CUDA graph: a replay repeats the call and copies its results."""

    def __init__(self, run, fault: str) -> None:
        self.run, self.found, self.fault, self.replays = run, run(), fault, 0

    def replay(self) -> None:
        self.replays += 1
        if self.fault == "holds the first contents":
            return
        for into, x in zip(self.found, self.run(), strict=True):
            into.copy_(x)
        if self.fault == "reads freed memory" and self.replays == 3:
            self.found.out[0, 0, 3] += 1


class Standing(Eager):
    """Attention with the faults that streams and graphs show."""

    masks = ("causal", "custom")

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.configs = {"default": {}, "other": {}}

    def __call__(self, q, k, v, *, mask, sm_scale, config="default", **beside):
        if self.fault == "has no graphs" and streams.cuda.is_captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        out, lse = super().__call__(q, k, v, mask=mask, sm_scale=sm_scale, config=config, **beside)
        wrong = {
            "its own stream": "stream" in streams.cuda.within,
            "its own device": "device" in streams.cuda.within,
            "kept in a capture": config == "other" and q.shape[2] == 5,
        }
        return (out + 1 if wrong.get(self.fault) else out), lse


@contextlib.contextmanager
def standing_in(fault: str = ""):
    """Replaces CUDA inside the block, and graphs by ``Graph`` with a fault."""
    within: list[str] = []

    @contextlib.contextmanager
    def entered(name):
        within.append(name)
        yield
        within.remove(name)

    cuda = SimpleNamespace(
        within=within, is_captured=False, Stream=lambda: "stream", stream=entered,
        device=lambda _index: entered("device"), device_count=lambda: 2,
        synchronize=lambda: None, _sleep=lambda _cycles: None,
    )  # fmt: skip

    def captured(run, warm_ups=2):
        cuda.is_captured = True
        try:
            graph = Graph(run, fault)
        finally:
            cuda.is_captured = False
        return graph.replay, graph.found

    replaced = {"cuda": cuda, "captured": captured, "overwrite_free_memory": lambda: None}
    with mock.patch.multiple(streams, _SIDE=8, **replaced):
        yield


def found(check: str, fault: str, problem: Problem = PROBLEM):
    """The findings of a check on a subject with a fault, on stand-ins for CUDA and graphs."""
    with standing_in(fault):
        trial = run_trial(Subject.of(Standing(fault), "standing"), problem)
        assert trial is not None
        return checks_of("streams")[check](trial)


@pytest.mark.parametrize("check", checks_of("streams"))
@pytest.mark.parametrize("problem", [PROBLEM, PREDICATE], ids=["plain", "predicate"])
def test_a_correct_subject_passes(check, problem):
    assert found(check, "", problem) == []


@pytest.mark.parametrize(
    ("check", "fault", "says"),
    [
        ("replayed", "holds the first contents", "replayed in a CUDA graph differs from a call"),
        ("replayed", "reads freed memory", "differs from a call after 70 others"),
        ("first captured", "kept in a capture", "after a first call in a CUDA graph leaves"),
        ("side stream", "its own stream", "on a side stream whose producer still runs differs"),
        ("two streams", "its own stream", "beside a call on another stream differs"),
        ("other kernels", "another result every call", "beside kernels that compete"),
        ("other device", "its own device", "while another GPU is current differs"),
    ],
)
def test_a_fault_is_found(check, fault, says):
    problem = PREDICATE if check == "first captured" else PROBLEM
    finding = found(check, fault, problem)[0]
    assert says in finding.claim
    assert finding.guarantee.startswith("G15")


def test_a_subject_that_cannot_be_captured_is_reported_unless_it_declares_it():
    says = r"cannot be captured .* capturing.*; a kernel that does not .* declares cuda_graphs=Fal"
    with pytest.raises(SubjectError, match=f"(?s){says}"):
        found("replayed", "has no graphs")
    subject = Standing("has no graphs")
    subject.cuda_graphs = False
    with standing_in():
        trial = run_trial(Subject.of(subject, "standing"), PROBLEM)
        assert checks_of("streams")["replayed"](trial) == []


def test_other_calls_are_more_than_a_cache_holds_and_have_other_lengths():
    subject = Subject.of(Eager(), "eager")
    others = list(streams._others(subject, PREDICATE))
    assert len({x.M for x in others}) > 1024
    assert len({(x.mask.seqlens_q, x.mask.seqlens_k) for x in others}) > 256
    assert len({x.mask for x in others if not x.mask.is_plain}) > 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_call_is_replayed_with_other_contents():
    x = torch.ones(3, device="cuda")
    replay, y = streams.captured(lambda: 2 * x)
    x.fill_(3)
    replay()
    assert y.tolist() == [6, 6, 6]
