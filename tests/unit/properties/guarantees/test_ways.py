"""Each way of making a call finds a kernel that is right in every other way."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import ClassVar

import pytest
import torch

from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.guarantee import G6, G8, G16
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.invariance import layout, repeatable, state
from fa_verify.properties.guarantees.memory import full_overwrite
from fa_verify.properties.guarantees.ways import one_way
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.ways import OF_BACKWARD, OF_FORWARD
from fa_verify.properties.running.trial import run_trial
from tests.unit.properties.guarantees.calls import found_on
from tests.unit.properties.guarantees.test_cache_checks import ATTENTION, attend

WAYS = (*OF_FORWARD, *OF_BACKWARD)
THREADS = "beside a call in another thread"
SCALE = threading.local()
PROBLEM = Problem(B=2, H=2, Hk=2, M=5, N=7, D=4, Dv=4, mask=Mask(causal=True), dtype="fp32")


def kept_by_address(kept, x):
    """The values that a tensor's memory had at first, among those of the last two addresses."""
    for old in [*kept][: max(0, len(kept) - 1)]:
        del kept[old]
    return kept.setdefault((x.data_ptr(), x.shape, x.stride()), x.clone())


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
            keys = kept_by_address(kept, k)
        if fault == "between":
            kept["q"] = q
            keys = k.clone()
            q = kept["q"]
        scores = (q @ keys.mT * scale).masked_fill(~seen, -math.inf)
        p = torch.nan_to_num(scores.softmax(-1), 0.0)
        if fault == "global":
            kept["p"] = p
        scratch = torch.empty_like(q[..., :1])
        if fault == "nan is empty":
            # Nothing was written: a number counts as a maximum.
            p = torch.where(scratch.isnan() | (scratch < -1e30), p, 1.25 * p)
        ctx.save_for_backward(q, keys, v, p)
        SCALE.of_forward = scale
        # Autograd holds no version of it to compare.
        ctx.out = p @ v
        return ctx.out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p = ctx.saved_tensors
        if ctx.fault == "unpacked twice":
            p = ctx.saved_tensors[3]
        fault = ctx.fault
        p = Stateful.kept["p"] if fault == "global" else p
        if fault == "shared rows" and dout.stride(2) == 0:
            dout = dout * (torch.arange(dout.shape[2]) == 0).view(-1, 1)
        out = ctx.out if fault == "kept out" else p @ v
        scale = getattr(SCALE, "of_forward", 1.0) if fault == "thread's own scale" else ctx.scale
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
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
        if fault == "object" and not k.requires_grad:
            k = Stateful.kept.setdefault(id(k), (k, k.clone()))[1]
        if fault == "lengths" and mask.seqlens_k is not None:
            key = seen.shape, sum(mask.seqlens_k)
            seen = Stateful.kept.setdefault(key, seen)
        out = Stateful.apply(q, k, v, seen, sm_scale, fault)
        if fault == "one buffer in inference" and not torch.is_grad_enabled():
            return Stateful.kept.setdefault(out.shape, torch.empty_like(out)).copy_(out)
        return 1.1 * out if fault == "not in training" and not torch.is_grad_enabled() else out

    kernel.gqa, kernel.masks, kernel.dtypes = False, ("causal", "padding"), ("fp32",)
    kernel.bitwise = ("G10",)
    return Subject.of(kernel, "kernel")


def found(fault, seed, *checks):
    """The guarantees that checks find broken on a problem with a seed."""
    one = subject(fault)
    trial = run_trial(one, dataclasses.replace(PROBLEM, seed=seed))
    return [x for check in checks for x in check(trial)]


FAULTS = {
    "address": "other values", "flag": "raises", "not in training": "without gradients",
    "consumed": "two backwards", "dk alone": "some gradients", "global": "another call is",
    "between": "beside a call in another thread", "unpacked twice": "the forward again",
    "kept out": "in a backward after out was changed in place",
    "thread's own scale": "in a backward in another thread",
}  # fmt: skip


def test_a_result_without_gradients_is_not_written_to_by_the_next_call():
    fault = "one buffer in inference"
    (finding,) = (x for seed in range(len(WAYS)) for x in found(fault, seed, one_way))
    assert "without gradients" in finding.claim


def test_a_tensor_that_needs_no_gradient_is_the_same_object_after_a_change_in_place():
    assert found("object", 0, accuracy) == []
    (finding,) = (x for seed in range(len(WAYS)) for x in found("object", seed, one_way))
    assert WAYS[0] in finding.claim


def test_lengths_in_another_order_are_those_of_another_call():
    problem = dataclasses.replace(PROBLEM, mask=Mask(seqlens_k=(3, 7)))
    for fault in ("", "lengths"):
        one = subject(fault)
        trial = run_trial(one, problem)
        assert accuracy(trial) == []
        Stateful.kept.clear()
        assert bool(one_way(trial)) == bool(fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_way_of_calling_finds_its_fault_and_no_other_does(fault):
    assert found(fault, 0, accuracy, repeatable, state) == []
    # Every way, with each gradient alone.
    findings = [x for seed in range(3 * len(WAYS)) for x in found(fault, seed, one_way)]
    told = {x.claim for x in findings}
    assert any(FAULTS[fault] in x for x in told)
    # Calls of two threads share the state of two calls, too.
    others = {x for x in told if FAULTS[fault] not in x}
    assert others <= ({f"differs {THREADS}"} if fault == "global" else set())
    assert {x.guarantee for x in findings} == {G16}


def test_every_way_finds_a_fault():
    assert all(any(words in way for words in FAULTS.values()) for way in WAYS)
    # Two ways make a call of another way beside their own.
    assert len(FAULTS) == len(WAYS) + 2


@pytest.mark.parametrize("seed", range(len(WAYS)))
def test_a_right_kernel_is_the_same_in_every_way(seed):
    assert found("", seed, one_way, layout, full_overwrite) == []


def test_a_kernel_may_hold_a_lock_while_another_thread_calls_it():
    lock = threading.Lock()
    inner = subject("").call

    def kernel(*tensors, **given):
        with lock:
            return inner(*tensors, **given)

    one = dataclasses.replace(subject(""), call=functools.wraps(inner)(kernel))
    trial = run_trial(one, dataclasses.replace(PROBLEM, seed=WAYS.index(THREADS)))
    assert one_way(trial) == []
    assert f"G16 {THREADS}" in trial.asked


def test_an_exception_tells_the_way():
    seed = next(x for x in range(len(WAYS)) if "forward again" in WAYS[x])
    (one,) = found("unpacked twice", seed, one_way)
    assert one.told.startswith("G16 ways of calling: kernel fails in a backward that computes")
    assert "unpack" in one.raised


def test_a_way_that_is_refused_is_not_applicable():
    seed = next(x for x in range(len(WAYS)) if "two backwards" in WAYS[x])
    trial = run_trial(subject("no second"), dataclasses.replace(PROBLEM, seed=seed))
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


class StatefulMerge(torch.autograd.Function):
    """A merge of states, and one fault of the way in which it is called."""

    kept: ClassVar[dict[object, object]] = {}

    @staticmethod
    def forward(ctx, outs, lses, fault):
        kept, ctx.fault = StatefulMerge.kept, fault
        if fault == "flag" and kept.pop("raised", False):
            outs = 2 * outs
        if len(lses) != len(outs):
            kept["raised"] = True
            raise ValueError("lses and outs differ")
        outs = torch.where(lses.isinf()[..., None], 0.0, outs)
        if fault == "address":
            lses = kept_by_address(kept, lses)
        if fault == "between":
            kept["outs"] = outs
            lses = lses.clone()
            outs = kept["outs"]
        lse = lses.logsumexp(0)
        weights = torch.nan_to_num((lses - lse).exp())[..., None]
        out = (weights * outs).sum(0)
        if fault == "global":
            out = kept.setdefault(out.shape, out).copy_(out)
        ctx.save_for_backward(outs, weights, out)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        outs, weights, out = ctx.saved_tensors
        if ctx.fault == "unpacked twice":
            outs = ctx.saved_tensors[0]
        douts = weights * dout
        dlses = weights[..., 0] * (dlse + ((outs - out) * dout).sum(-1))
        if ctx.fault == "one gradient" and not ctx.needs_input_grad[1]:
            douts = 2 * douts
        if ctx.fault == "consumed":
            weights.data.mul_(0.5)
        return douts, dlses, None


def merges(fault):
    StatefulMerge.kept.clear()

    def merge(outs, lses):
        out, lse = StatefulMerge.apply(outs, lses, fault)
        return (1.1 if fault == "not in training" and not torch.is_grad_enabled() else 1) * out, lse

    merge.states, merge.bitwise, merge.dtypes = True, ("G10",), ("fp32",)
    return Subject.of(merge, "merge")


MERGE = MergeProblem(parts=(3, 5), B=2, H=2, M=4, Dv=5, dtype="fp32")
OF_MERGES = {
    "address": "other values", "flag": "raises", "global": "another call is",
    "between": "another thread", "not in training": "without gradients",
    "consumed": "two backwards", "one gradient": "some gradients",
    "unpacked twice": "the forward again",
}  # fmt: skip


@pytest.mark.parametrize("fault", OF_MERGES)
def test_a_way_of_merging_finds_its_fault(fault):
    others = [x for name, x in checks_of(kind="merge").items() if name != "ways"]
    assert [x for check in others for x in found_on(merges(fault), MERGE, check)] == []
    told = {
        x.claim
        for seed in range(2 * len(WAYS))
        for x in found_on(merges(fault), dataclasses.replace(MERGE, seed=seed), one_way)
    }
    assert any(OF_MERGES[fault] in x for x in told)
    assert all(OF_MERGES[fault] in x or fault in ("global", "address") for x in told)


@pytest.mark.parametrize("seed", range(2 * len(WAYS)))
def test_a_right_merge_is_the_same_in_every_way(seed):
    problem = dataclasses.replace(MERGE, seed=seed, parts=(3, 0, 5), hidden=4)
    assert found_on(merges(""), problem, one_way) == []


def caches(fault):
    kept = {}

    def attention(q, k, v, **given):
        raise NotImplementedError

    def cached(q, k_cache, v_cache, *, cache_seqlens, **given):
        if fault == "flag":
            q = 2 * q if kept.pop("raised", False) else q
            if q.shape[3] != k_cache.shape[3]:
                kept["raised"] = True
        if fault == "address":
            cache_seqlens = kept.setdefault(cache_seqlens.data_ptr(), cache_seqlens.clone())
        if fault == "between":
            kept["q"] = q
            cache_seqlens = cache_seqlens.clone()
            q = kept["q"]
        out, lse = attend(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **given)
        if fault == "global":
            out = kept.setdefault(out.shape, out).copy_(out)
        return out, lse

    attention.kvcache, attention.bitwise, attention.dtypes = cached, ("G10",), ("fp32",)
    return Subject.of(attention, "attention")


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("fault", ["", "address", "flag", "global", "between"])
def test_a_way_of_calling_with_a_cache_finds_its_fault(fault, page_size):
    call = CacheProblem(attention=ATTENTION, page_size=page_size, new=3, spare=2)
    told = {
        x.claim
        for seed in range(len(OF_FORWARD))
        for x in found_on(caches(fault), changed(call, seed=seed), one_way)
    }
    assert any(OF_MERGES[fault] in x for x in told) if fault else told == set()


def packed(fault):
    """Attention to packed sequences in PyTorch, with a schedule that may be kept."""
    kept = {}

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **_):
        offsets = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
        if fault:
            offsets = kept.setdefault(
                (cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr()), (cu_seqlens_q, offsets)
            )[1]
        out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=q.dtype)
        parts = []
        for b in range(len(offsets[0]) - 1):
            rows, keys = (slice(x[b], x[b + 1]) for x in offsets)
            scores = torch.einsum("mhd,nhd->hmn", q[rows], k[keys]) * q.shape[2] ** -0.5
            parts.append(torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v[keys]))
        return torch.cat(parts) if parts else out

    for word, value in {
        "varlen": True, "masks": ("padding",), "fixed_scale": "1/sqrt(D)", "gqa": False,
        "returns_lse": False, "dtypes": ("fp32",), "bitwise": ("G10",), "zero_sizes": False,
    }.items():  # fmt: skip
        setattr(varlen, word, value)
    return Subject.of(varlen, "varlen")


@pytest.mark.parametrize("fault", ["", "address"])
def test_offsets_of_packed_sequences_are_changed_in_place(fault):
    mask = Mask(seqlens_q=(5, 2, 4), seqlens_k=(3, 7, 4))
    problem = Problem(B=3, H=2, Hk=2, M=5, N=7, D=4, Dv=4, mask=mask, dtype="fp32")
    found = {}
    for seed, way in enumerate(WAYS):
        one = packed(fault)
        trial = run_trial(one, dataclasses.replace(problem, seed=seed))
        assert accuracy(trial) == []
        found[way] = one_way(trial)
    assert bool(found[OF_FORWARD[0]]) == bool(fault)
    assert not any(x for way, x in found.items() if way != OF_FORWARD[0])
