"""Closed-form checks: a correct subject gives the known outputs bitwise, and faults are found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import closed_form
from fa_verify.properties.guarantees.claims import accuracy
from fa_verify.properties.guarantees.closed_form import (
    counts,
    doubled_values,
    mask_read_back,
    permuted,
    unit_values,
)
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_trial

LENGTHS = Mask(causal=True, seqlens_q=(17, 20), seqlens_k=(13, 9))
FEWER_PADS = replace(LENGTHS, seqlens_k=(13, 13))
PROBLEM = Problem(
    **{"B": 2, "H": 4, "Hk": 2, "M": 20, "N": 13, "D": 5, "Dv": 3, "seed": 2},
    dtype="bf16",
    dirty="nan",
    mask=LENGTHS,
)
CHECKS = [counts, doubled_values, mask_read_back, permuted, unit_values]


class Eager:
    """Plain attention in PyTorch that casts its weights to the inputs' dtype, with a fault."""

    returns_lse = True
    bitwise = ("G4", "G5", "G9", "G10")

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def seen(self, mask, B, H, M, N):
        seen = mask.dense(B, H, M, N).expand(B, H, M, N).clone()
        if self.fault == "sees one key more":
            seen[1, 0, 10, 12] = True
        if self.fault == "sees one key less":
            seen[0, 2:, 12, 2] = False
        if self.fault == "loses the last key":
            seen[..., -1] = False
        return seen

    def __call__(self, q, k, v, *, mask, sm_scale):
        (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
        seen, dtype = self.seen(mask, B, H, M, N), v.dtype
        work = torch.float64 if dtype == torch.float64 else torch.float32
        live, used = seen.any(3, keepdim=True), seen.any((1, 2)).view(B, 1, N, 1)
        q, k, v = (
            torch.where(valid, x, 0.0).to(work)
            for valid, x in zip((live, used, used), (q, k, v), strict=True)
        )
        k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
        scores = torch.where(seen, q @ k.mT * sm_scale, -math.inf)
        m = torch.where(live, scores.detach().amax(3, keepdim=True), 0.0) if N else 0.0
        e = torch.where(seen, torch.exp(scores - m), 0.0)
        total = torch.where(live, e.sum(3, keepdim=True), 1.0)
        out = (e.to(dtype).to(work) @ v) / total
        lse = torch.where(live, m + total.log(), -math.inf).squeeze(3).detach()
        return self.spoil(out, lse, live, v).to(dtype), lse

    def spoil(self, out, lse, live, v):
        if self.fault == "divides by one too few":
            count = lse.exp().unsqueeze(3)
            out = torch.where(live, out * count / (count - 2.0**-6), out)
        if self.fault == "divides by one too many":
            count = lse.exp().unsqueeze(3)
            out = torch.where(live, out * count / (count + 2.0**-6), out)
        if self.fault == "NaN where it sees":
            out = torch.where(out != 0, torch.nan, out)
        if self.fault == "clips large values":
            out = out.clamp(-2.0, 2.0)
        if self.fault == "lse depends on values":
            lse += torch.where(live.squeeze(3), v.detach().abs().amax() * 2.0**-4, 0.0)
        if self.fault == "last head differs":
            out = torch.cat([out[:, :-1], out[:, -1:] * (1 + 2.0**-10)], 1)
        if self.fault == "a little more for large values" and float(v.detach().abs().amax()) > 8:
            out = out * (1 + 2.0**-10)
        return torch.where(live, out, 0.0)


def trial_of(fault: str = "", problem: Problem = PROBLEM) -> AttentionTrial:
    trial = run_trial(Subject.of(Eager(fault), "eager"), problem)
    assert trial is not None
    return trial


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_empty_problems_pass(check, sizes):
    assert check(trial_of(problem=replace(PROBLEM, mask=Mask(), **sizes))) == []


@pytest.mark.parametrize(
    ("fault", "check", "outputs"),
    [
        ("sees one key more", counts, ["lse"]),
        ("sees one key less", counts, ["lse"]),
        ("divides by one too few", unit_values, ["out"]),
        ("divides by one too many", unit_values, ["out"]),
        ("NaN where it sees", mask_read_back, ["out"]),
        ("clips large values", doubled_values, ["out"]),
        ("lse depends on values", doubled_values, ["lse"]),
        ("a little more for large values", doubled_values, ["out"]),
        ("last head differs", permuted, ["out", "dq", "dk", "dv"]),
    ],
)
def test_a_fault_is_caught_on_its_output(fault, check, outputs):
    problem = replace(PROBLEM, mask=FEWER_PADS)
    assert [finding.output for finding in check(trial_of(fault, problem))] == outputs


@pytest.mark.parametrize("fault", ["sees one key more", "sees one key less"])
def test_the_mask_read_back_finds_one_wrong_pair(fault):
    out, dv = mask_read_back(trial_of(fault, replace(PROBLEM, Dv=24, mask=FEWER_PADS)))
    assert (out.output, dv.output) == ("out", "dv")
    assert (out.where, out.bad, dv.where, dv.bad) == {
        "sees one key more": ("b=1 h=0 m=10 d=12", 1, "b=1 h=0 n=12 d=10", 1),
        "sees one key less": ("b=0 h=2 m=12 d=2", 2, "b=0 h=1 n=2 d=12", 1),
    }[fault]


def test_the_mask_read_back_reads_every_place_some_time():
    found = set()
    for seed in range(30):
        problem = replace(PROBLEM, seed=seed, mask=FEWER_PADS)
        found |= {x.output for x in mask_read_back(trial_of("sees one key more", problem))}
    assert found == {"out", "dv"}


@pytest.mark.parametrize("check", [counts, mask_read_back])
def test_rows_are_read_a_chunk_at_a_time(check, monkeypatch):
    monkeypatch.setattr(closed_form, "chunk_height", lambda *sizes: 3)
    for seed in range(8):
        problem = replace(PROBLEM, seed=seed, Dv=7, mask=Mask(window_left=4, window_right=1))
        assert check(trial_of(problem=problem)) == []
    problem = replace(PROBLEM, Dv=24, mask=FEWER_PADS)
    assert check(trial_of("sees one key less", problem)) != []


class FirstHead(Mask):
    """A mask under which only the first head sees keys."""

    def mask_mod(self, b, h, m, n, *, M, N):
        return h == 0


def test_one_head_of_a_group_that_sees_a_pair_is_enough_for_dv():
    trial = trial_of(problem=replace(PROBLEM, mask=FirstHead(), Dv=24))
    assert mask_read_back(trial) == []


def test_a_mask_that_depends_on_the_head_is_permuted_with_it():
    assert permuted(trial_of(problem=replace(PROBLEM, mask=FirstHead()))) == []


@pytest.mark.parametrize("check", [mask_read_back, unit_values, doubled_values])
def test_padding_keeps_what_the_problem_put_there(check):
    class Recorder(Eager):
        def __call__(self, q, k, v, *, mask, sm_scale):
            calls.append(v.detach())
            return super().__call__(q, k, v, mask=mask, sm_scale=sm_scale)

    calls: list[torch.Tensor] = []
    trial = run_trial(Subject.of(Recorder(), "recorder"), PROBLEM)
    check(trial)
    assert len(calls) == 2
    assert calls[1][1, :, 9:].isnan().all()
    assert calls[1][1, :, :9].isfinite().all()


def test_a_subject_without_lse_is_not_counted():
    class OutAlone(Eager):
        returns_lse = False

        def __call__(self, q, k, v, *, mask, sm_scale):
            return super().__call__(q, k, v, mask=mask, sm_scale=sm_scale)[0]

    trial = run_trial(Subject.of(OutAlone("sees one key less"), "out alone"), PROBLEM)
    assert counts(trial) == []


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_unit_values_are_for_16_bits(dtype):
    assert unit_values(trial_of("divides by one too few", replace(PROBLEM, dtype=dtype))) == []


def test_a_row_of_65_536_keys_is_counted_exactly():
    problem = replace(PROBLEM, B=1, H=1, Hk=1, M=2, N=65_536, mask=Mask(), dtype="fp16")
    trial = trial_of(problem=problem)
    for check in (counts, mask_read_back, unit_values):
        assert check(trial) == []
    assert [finding.bad for finding in counts(trial_of("loses the last key", problem))] == [2]


@pytest.mark.parametrize(
    "outside",
    [{"inputs": "times40"}, {"inputs": "subnormal", "dtype": "bf16"}],
    ids=str,
)
def test_values_are_not_scaled_where_something_could_over_or_underflow(outside):
    problem = replace(PROBLEM, mask=Mask(), **outside)
    assert doubled_values(trial_of("lse depends on values", problem)) == []


def test_subnormal_outputs_are_not_compared():
    problem = replace(PROBLEM, mask=Mask(), dtype="fp16", inputs="tiny")
    trial = trial_of(problem=problem)
    assert (trial.got.out.abs() < 2.0**-14).any()
    assert doubled_values(trial) == []
    assert doubled_values(trial_of("lse depends on values", problem)) != []


def test_values_near_the_largest_are_not_scaled():
    trial = trial_of("lse depends on values", replace(PROBLEM, mask=Mask(), dtype="fp16"))
    large = trial.inputs._replace(v=trial.inputs.v * 2.0**13)
    assert doubled_values(trial) != []
    assert doubled_values(replace(trial, inputs=large)) == []


@pytest.mark.parametrize(
    ("check", "fault"),
    [(permuted, "last head differs"), (doubled_values, "a little more for large values")],
)
def test_without_a_promise_the_bound_decides(check, fault):
    class Unpromising(Eager):
        bitwise = ()

    problem = replace(PROBLEM, mask=Mask())
    assert check(trial_of(fault, problem)) != []
    trial = run_trial(Subject.of(Unpromising(fault), "unpromising"), problem)
    assert check(trial) == []
    bound = trial.judgement.bound
    tight = replace(trial.judgement, bound=bound._replace(out=bound.out / 64))
    found = check(replace(trial, judgement=tight))
    assert found != []
    # The message has the bound that decides, and the exact value.
    assert all(x.claim.endswith(", and leaves the bound") for x in found)
    assert all(abs(x.got - x.want) > x.bound > 0 for x in found)


@pytest.mark.parametrize("check", [permuted, doubled_values])
def test_without_a_promise_an_element_that_is_wrong_in_both_runs_is_left_to_accuracy(check):
    class Unpromising(Eager):
        bitwise = ()

    problem = replace(PROBLEM, mask=Mask())
    trial = run_trial(Subject.of(Unpromising("loses the last key"), "unpromising"), problem)
    assert {"out", "lse"} <= {x.output for x in accuracy(trial)}
    assert check(trial) == []


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("mask", [Mask(), Mask(window_left=3, window_right=2), LENGTHS], ids=str)
def test_a_correct_subject_passes(check, dtype, mask):
    layouts = ("bshd", "expanded", "expanded", "padded")
    for seed in range(4):
        problem = replace(PROBLEM, dtype=dtype, mask=mask, seed=seed, layouts=layouts)
        assert check(trial_of(problem=problem)) == []
