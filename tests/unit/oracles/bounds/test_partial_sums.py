"""Partial sums of dk and dv that are rounded to the input dtype and added in it by atomics."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.bounds.in_numpy.bound import bound
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.statistics import mean_squares
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import run_trial
from fa_verify.properties.search.declaring import declarations_that_fit
from fa_verify.properties.search.search import Runner

PLAIN = Numerics(p_dtype="fp32", p_normalised=True, backward_reads=("out",))
DECLARED = dataclasses.replace(PLAIN, atomic=("dk", "dv"), partial_sums="input")
PROBLEM = Problem(H=4, Hk=2, M=256, N=40, D=24, dtype="bf16")


class _InMemory(torch.autograd.Function):
    """Attention in float32, with dk and dv summed by tiles of rows, in the order of a seed."""

    @staticmethod
    def forward(ctx, q, k, v, seen, scale, tile):
        q32, k32, v32 = (x.float() for x in (q, k, v))
        G = q.shape[1] // k.shape[1]
        s = q32 @ k32.repeat_interleave(G, 1).mT * scale
        live = seen.any(3, keepdim=True)
        s = s.masked_fill(~seen, -torch.inf).masked_fill(~live, 0.0)
        p = s.softmax(3).masked_fill(~live, 0.0)
        out = (p @ v32.repeat_interleave(G, 1)).to(q.dtype)
        ctx.save_for_backward(q32, k32, v32, p, out)
        ctx.how = scale, tile, live
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p, out = ctx.saved_tensors
        scale, tile, live = ctx.how
        dtype, Hk, G = out.dtype, k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(G, 1) for x in (k, v))
        q, dout = (torch.where(live, x.float(), 0.0) for x in (q, dout))
        delta = (dout * out.float()).sum(3, keepdim=True)
        ds = p * (dout @ v.mT - delta)
        dk, dv = (torch.zeros_like(x[:, :Hk], dtype=dtype) for x in (k, v))
        rng = torch.Generator().manual_seed(0)
        starts = range(0, q.shape[2], tile)
        # Heads of a group add to the same memory.
        adding = [(h, start) for h in range(q.shape[1]) for start in starts]
        for i in torch.randperm(len(adding), generator=rng).tolist():
            h, start = adding[i]
            rows = slice(start, start + tile)
            of_dk = ds[:, h, rows].mT @ q[:, h, rows] * scale
            of_dv = p[:, h, rows].mT @ dout[:, h, rows]
            dk[:, h // G] += of_dk.to(dtype)
            dv[:, h // G] += of_dv.to(dtype)
        return (ds @ k * scale).to(dtype), dk, dv, None, None, None


def attention(tile: int, numerics: Numerics = DECLARED) -> Subject:
    def in_memory(q, k, v, *, mask, sm_scale):
        seen = mask.dense(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        seen = seen.expand(*q.shape[:3], k.shape[2])
        return _InMemory.apply(q, k, v, seen, sm_scale, tile)

    return dataclasses.replace(Subject.of(in_memory, "in_memory"), numerics=numerics)


def found(subject: Subject, problem: Problem) -> set[str]:
    findings = Runner(subject, Tally()).findings(problem, claims.accuracy)
    return {x.output for x in findings}


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("inputs", ["normal", "times8", "tiny"])
def test_rounded_partial_sums_hold_if_they_are_declared(dtype, tile, inputs):
    problem = dataclasses.replace(PROBLEM, dtype=dtype, inputs=inputs)
    assert found(attention(tile), problem) == set()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "numerics",
    [PLAIN, dataclasses.replace(PLAIN, atomic=("dk", "dv"))],
    ids=["undeclared", "fp32 atomics"],
)
def test_rounded_partial_sums_fail_if_they_are_not_declared(dtype, numerics):
    problem = dataclasses.replace(PROBLEM, dtype=dtype)
    assert found(attention(16, numerics), problem) == {"dk", "dv"}


@pytest.mark.parametrize("output", ["dk", "dv"])
def test_a_declaration_is_about_its_outputs_alone(output):
    numerics = dataclasses.replace(DECLARED, atomic=(output,))
    assert found(attention(16, numerics), PROBLEM) == {"dk", "dv"} - {output}


def test_a_head_that_is_left_out_of_the_sums_is_found(monkeypatch):
    backward = _InMemory.backward

    def wrong(ctx, dout):
        return backward(ctx, torch.cat([torch.zeros_like(dout[:, :1]), dout[:, 1:]], 1))

    monkeypatch.setattr(_InMemory, "backward", staticmethod(wrong))
    assert {"dk", "dv"} <= found(attention(16), PROBLEM)


@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_atomics_in_fp32_lose_two_smallest_numbers_with_each_tile_of_rows(scale):
    q, k = (torch.ones(1, 1, n, 8, dtype=torch.float64) for n in (40, 5))
    inputs = q, k, k, torch.zeros_like(q)
    call = {"mask": Mask(), "sm_scale": scale, "in_dtype": "fp32"}
    bounds = []
    for atomic in ((), ("dk", "dv")):
        numerics = Numerics(atomic=atomic)
        of_torch = judge(*inputs, **call, numerics=numerics).bound
        of_numpy = bound(*(x.numpy() for x in inputs), **call, numerics=numerics)
        bounds.append([*of_torch[3:], *(torch.from_numpy(x) for x in of_numpy[3:])])
    lost = 3 * 2 * 2.0**-126  # 40 rows are three tiles
    for without, within, factor in zip(*bounds, (max(1.0, scale), 1.0) * 2, strict=True):
        torch.testing.assert_close(
            within - without, torch.full_like(within, factor * lost), rtol=1e-5, atol=0
        )


def test_statistics_do_not_judge_partial_sums():
    trial = run_trial(attention(16), PROBLEM)
    assert trial is not None
    assert {*mean_squares(trial)} == {"out", "dq"}
    assert identities(trial) == []


def test_the_declarations_are_offered_together():
    runner = Runner(attention(16, PLAIN), Tally())
    for features in ([], [Feature("grouped heads")]):
        offered = declarations_that_fit(runner, claims.accuracy, [PROBLEM], features, ["dk"])
        both = 'atomic=("dk", "dv"), partial_sums="input"'
        assert (both in offered) == (not features)
