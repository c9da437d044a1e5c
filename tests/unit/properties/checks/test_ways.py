"""Each way of making a call finds a kernel that is right in every other way."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from fa_verify.oracles.guarantee import G6, G8, G16
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.accuracy import accuracy
from fa_verify.properties.checks.invariance import layout, repeatable, state
from fa_verify.properties.checks.memory import full_overwrite
from fa_verify.properties.checks.ways import WAYS, one_way
from fa_verify.properties.execution.trial import run_trial
from fa_verify.properties.subjects.subject import Subject

PROBLEM = Problem(B=2, H=2, Hk=2, M=5, N=7, D=4, Dv=4, mask=Mask(causal=True), dtype="fp32")


class Stateful(torch.autograd.Function):
    """Attention with saved probabilities, and one fault of the way in which it is called."""

    kept: ClassVar[dict[object, object]] = {}

    @staticmethod
    def forward(ctx, q, k, v, seen, scale, fault):
        ctx.fault, ctx.scale = fault, scale
        kept = Stateful.kept
        if fault == "flag" and kept.pop("raised", False):
            scale *= 1.5
        if fault == "flag" and q.shape[3] != k.shape[3]:
            kept["raised"] = True
        keys = k
        if fault == "address":
            at = (k.data_ptr(), k.shape, k.stride())
            # The copies of the last two addresses.
            for old in [*kept][: max(0, len(kept) - 1)]:
                del kept[old]
            keys = kept.setdefault(at, k.clone())
        scores = (q @ keys.mT * scale).masked_fill(~seen, -math.inf)
        p = torch.nan_to_num(scores.softmax(-1), 0.0)
        if fault == "global":
            kept["p"] = p
        scratch = torch.empty_like(q[..., :1])
        if fault == "nan is empty":
            # Nothing was written: a number counts as a maximum.
            p = torch.where(scratch.isnan() | (scratch < -1e30), p, 1.25 * p)
        ctx.save_for_backward(q, keys, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p = ctx.saved_tensors
        fault = ctx.fault
        p = Stateful.kept["p"] if fault == "global" else p
        if fault == "shared rows" and dout.stride(2) == 0:
            dout = dout * (torch.arange(dout.shape[2]) == 0).view(-1, 1)
        ds = p * (dout @ v.mT - (dout * (p @ v)).sum(-1, keepdim=True)) * ctx.scale
        dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ dout
        if fault == "dk alone" and not ctx.needs_input_grad[0]:
            dk = 2 * dk
        if fault == "no second":
            if "backward" in Stateful.kept:
                raise NotImplementedError("one backward")
            Stateful.kept["backward"] = True
        if fault == "consumed":
            # As a kernel writes, unseen by autograd.
            p.data.mul_(0.5)
        return dq, dk, dv, None, None, None


def subject(fault):
    Stateful.kept.clear()

    def kernel(q, k, v, *, mask, sm_scale):
        seen = mask.dense(*q.shape[:3], k.shape[2])
        if fault == "flag" and q.shape[3] != k.shape[3]:
            Stateful.kept["raised"] = True
            raise ValueError("k has another head_dim")
        out = Stateful.apply(q, k, v, seen, sm_scale, fault)
        return 1.1 * out if fault == "not in training" and not torch.is_grad_enabled() else out

    kernel.gqa, kernel.masks, kernel.dtypes = False, ("causal",), ("fp32",)
    kernel.bitwise = ("G10",)
    return Subject.of(kernel, "kernel")


def found(fault, seed, *checks):
    """The guarantees that checks find broken on a problem with a seed."""
    one = subject(fault)
    trial = run_trial(one, Problem(**{**vars(PROBLEM), "seed": seed}))
    return [x for check in checks for x in check(trial)]


FAULTS = {
    "address": "other values", "flag": "raises", "not in training": "without gradients",
    "consumed": "two backwards", "dk alone": "some gradients", "global": "another call",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_way_of_calling_finds_its_fault_and_no_other_does(fault):
    assert found(fault, 0, accuracy, repeatable, state) == []
    # Every way, with each set of gradients.
    findings = [x for seed in range(len(WAYS) ** 2) for x in found(fault, seed, one_way)]
    assert findings
    assert all(FAULTS[fault] in x.claim for x in findings)
    assert {x.guarantee for x in findings} == {G16}


def test_every_way_finds_a_fault():
    assert all(any(words in way for words in FAULTS.values()) for way in WAYS)
    assert len(FAULTS) == len(WAYS)


@pytest.mark.parametrize("seed", range(len(WAYS)))
def test_a_right_kernel_is_the_same_in_every_way(seed):
    assert found("", seed, one_way, layout, full_overwrite) == []


def test_a_way_that_is_refused_is_not_applicable():
    trial = run_trial(subject("no second"), Problem(**{**vars(PROBLEM), "seed": 3}))
    assert one_way(trial) == []
    (said,) = trial.asked.values()
    assert said == "not applicable to kernel: one backward"


def test_a_dout_that_rows_share_is_asked_for():
    guarantees = [found("shared rows", seed, layout) for seed in range(11)]
    assert {x.guarantee for of in guarantees for x in of} == {G8}
    assert found("shared rows", 0, accuracy, repeatable) == []


def test_a_plausible_number_in_allocations_is_asked_for():
    assert found("nan is empty", 0, accuracy, full_overwrite) == []
    (one,) = found("nan is empty", 1, full_overwrite)[:1]
    assert one.guarantee == G6
    assert "if allocations hold -2.75" in one.claim
