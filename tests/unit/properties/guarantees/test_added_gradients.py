"""The gradients of a bias and of sinks, where elements share memory and calls follow each other."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.added_gradients import bias_gradient, sink_gradient
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_trial

PROBLEM = Problem(B=2, H=2, Hk=2, M=5, N=7, D=4, Dv=4, dtype="fp32")


class Passed(torch.autograd.Function):
    """The identity, with a fault in its gradient."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        ctx.shared = [place for place, step in enumerate(x.stride()) if step == 0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fault == "strides of the bias":  # the last store of each address remains
            for place in ctx.shared:
                last = grad.narrow(place, grad.shape[place] - 1, 1)
                grad = last.expand_as(grad)
        if ctx.fault == "one buffer":
            grad = BUFFERS.setdefault(grad.shape, torch.empty_like(grad)).copy_(grad).view_as(grad)
        return grad, None


BUFFERS: dict[torch.Size, torch.Tensor] = {}


def subject(fault):
    def kernel(q, k, v, *, mask, sm_scale, bias=None, sinks=None):
        scores = q @ k.mT * sm_scale
        if bias is not None:
            scores = scores + Passed.apply(bias, fault)
        if sinks is not None:
            own = Passed.apply(sinks, fault).to(scores.dtype)
            own = own.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, own], -1)
        return scores.softmax(-1)[..., : k.shape[2]] @ v

    kernel.gqa, kernel.masks, kernel.dtypes = False, (), ("fp32",)
    kernel.score_mods = ("bias", "sinks")
    kernel.p_dtype, kernel.p_normalised = "fp32", True
    return Subject.of(kernel, "kernel")


def found(fault, check, **fields):
    one = subject(fault)
    given = {**vars(PROBLEM), **fields}
    return [x for seed in (0, 1) for x in check(run_trial(one, Problem(**{**given, "seed": seed})))]


@pytest.mark.parametrize("axes", ["/", "/mn", "/hmn", "/bhmn"])
def test_an_expanded_bias_has_a_gradient_for_each_element(axes):
    assert found("", bias_gradient, bias=f"normal{axes}") == []
    shared = found("strides of the bias", bias_gradient, bias=f"normal{axes}")
    assert [x.output for x in shared] == ["dbias", "dbias"] * (axes != "/bhmn")
    assert all(math.isfinite(x.got) for x in shared)


def test_a_gradient_of_sinks_stays_as_it_is_in_the_next_backward():
    assert found("", sink_gradient, sinks="ordinary") == []
    changed = found("one buffer", sink_gradient, sinks="ordinary")
    assert {x.claim for x in changed} == {"changes in the backward of the next call"}
    assert {(x.guarantee, x.output) for x in changed} == {("G16", "dsinks")}
