"""Covering arrays find a gradient of a shared bias, or of sinks, that lacks a part of its sum."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fa_verify.conformance import test_combinations as combinations
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.covering_problems import covering_problems
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search import search
from fa_verify.properties.search.search import Runner

# By fault: the tensor, the axis of (B, H, M, N) along which it is shared, and the first place that
# adds nothing to its gradient.
FAULTS = {
    "third entry": ("bias", 0, 2), "fifth head": ("bias", 1, 4), "second tile": ("bias", 2, 64),
    "sinks of entries": ("sinks", 0, 2), "sinks of rows": ("sinks", 2, 64),
}  # fmt: skip
(ATTENTION,) = (x.values[0] for x in combinations.CASES if x.id == "attention-0")


class Shared(torch.autograd.Function):
    """Expand a tensor to a shape; the gradient is the sum over a part of it."""

    @staticmethod
    def forward(ctx, x, shape, axis, end):
        ctx.shape, ctx.axis, ctx.end = x.shape, axis, end
        return x.expand(shape).clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.axis is not None and ctx.shape[ctx.axis] == 1:
            gradient = gradient.narrow(ctx.axis, 0, min(ctx.end, gradient.shape[ctx.axis]))
        return gradient.sum_to_size(ctx.shape), None, None, None


def subject(fault):
    """Return attention that is right but for the gradient of a bias or of sinks."""
    of, *place = FAULTS.get(fault, ("", None, 0))

    def kernel(q, k, v, *, mask, sm_scale, bias=None, sinks=None):
        (B, H, M, _), N = q.shape, k.shape[2]
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        seen = mask.dense(B, H, M, N)
        scores = q @ k.mT * sm_scale
        if bias is not None:
            part = place if of == "bias" else (None, 0)
            scores = scores + Shared.apply(bias, scores.shape, *part)
        scores = torch.where(seen, scores, -1e300)
        if sinks is not None:
            part = place if of == "sinks" else (None, 0)
            sink = Shared.apply(sinks.to(q.dtype).view(1, H, 1, 1), (B, H, M, 1), *part)
            scores = torch.cat([scores, sink], 3)
        p = torch.where(seen, scores.softmax(3)[..., :N], 0.0)
        return p @ v

    kernel.dtypes, kernel.head_dims, kernel.layouts = ("fp64",), (16,), ("bhsd",)
    kernel.masks, kernel.score_mods, kernel.zero_sizes = ("causal",), ("bias", "sinks"), False
    return Subject.of(kernel, "kernel")


@pytest.fixture(scope="module")
def array():
    return covering_problems(subject(""), "cpu", most=24)


@pytest.fixture
def run(array, monkeypatch):
    """Return a function that asks for all combinations of a kernel, as a whole run does."""
    monkeypatch.setattr(combinations, "combinations_of", lambda config, kind: array)
    monkeypatch.setattr(combinations, "mask_of", lambda config: None)
    monkeypatch.setattr(search, "plainest", lambda runner, findings, claim: findings)
    asked = combinations.test_every_combination_lies_within_the_derived_bound

    def of(fault):
        tally = Tally()
        runner = Runner(subject(fault), tally)
        for part in range(combinations.PARTS["attention"]):
            asked(runner, tally, SimpleNamespace(), ATTENTION, part)

    return of


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_adds_nothing_is_found(run, fault):
    with pytest.raises(Violation) as info:
        run(fault)
    assert {x.output for x in info.value.findings} == {f"d{FAULTS[fault][0]}"}


def test_a_right_kernel_holds(run):
    run("")


def test_a_bias_is_shared_in_every_way_beside_several_entries_heads_and_tiles(array):
    biases = {x.bias for x in array.calls} - {"none"}
    assert len(biases) == 7
    for bias in biases:
        problems = [x for x in array.calls if x.bias == bias]
        assert any(x.B > 2 for x in problems)
        assert any(x.H > 16 for x in problems)
        assert any(x.G > 4 for x in problems)
        assert any(x.M > 64 for x in problems)
    assert 4 * sum(x.bias == "none" for x in array.calls) > len(array.calls)
