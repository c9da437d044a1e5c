"""The probe finds what a kernel returns as lse, and where its causal diagonal lies."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.probing.probe import probe
from fa_verify.properties.kernels.subject import Subject


def with_lse(base: str = "e", empty: float = -math.inf, top_left: bool = False):
    """A kernel that returns lse by some convention."""

    def kernel(q, k, v, *, mask, sm_scale):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
        if top_left and mask.causal:
            seen = torch.ones_like(seen).tril()
        scores = (q.float() @ k.float().mT * sm_scale).masked_fill(~seen, -torch.inf)
        rows = seen.any(-1)
        lse = scores.logsumexp(-1) / (math.log(2) if base == "2" else 1.0)
        p = torch.softmax(scores, -1).nan_to_num(0.0)
        return (p @ v.float()).to(q.dtype), torch.where(rows, lse, empty)

    return kernel


def probed(kernel):
    return probe(Subject.of(kernel, "kernel"), topics=("conventions",))


@pytest.mark.parametrize("base", ["e", "2"])
def test_the_base_of_lse_is_found(base):
    found = probed(with_lse(base))
    assert found["returns_lse"].value is True
    assert found["lse_base"].value == base


@pytest.mark.parametrize("word", ["-inf", "+inf", 0])
def test_lse_of_empty_rows_is_found(word):
    assert probed(with_lse(empty=float(word)))["empty_lse"].value == word


def test_other_values_of_empty_rows_stay_undecided():
    answer = probed(with_lse(empty=-1e30))["empty_lse"]
    assert (answer.value, answer.certainty) == (None, "undecided")
    assert "-1e+30" in answer.evidence


def test_an_lse_of_another_meaning_stays_undecided():
    def kernel(q, k, v, *, mask, sm_scale):
        out, lse = with_lse()(q, k, v, mask=mask, sm_scale=sm_scale)
        return out, lse + 7

    assert probed(kernel)["lse_base"].certainty == "undecided"


@pytest.mark.parametrize("top_left", [False, True])
def test_the_alignment_of_the_diagonal_is_found(top_left):
    answer = probed(with_lse(top_left=top_left))["causal_alignment"]
    assert answer.value == ("top-left" if top_left else "bottom-right")


@pytest.mark.parametrize("base", ["e", "2"])
def test_the_gradient_of_lse_is_found(base):
    assert probed(with_lse(base))["lse_grad"].value is True


def test_the_gradient_of_lse_may_be_missing():

    def without(q, k, v, *, mask, sm_scale):
        out, lse = with_lse()(q, k, v, mask=mask, sm_scale=sm_scale)
        return out, lse.detach()

    assert probed(without)["lse_grad"].value is False


def test_a_wrong_gradient_of_lse_is_no_gradient():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 2 * dx

    def wrong(q, k, v, *, mask, sm_scale):
        out, lse = with_lse()(q, k, v, mask=mask, sm_scale=sm_scale)
        return out, Doubled.apply(lse)

    assert probed(wrong)["lse_grad"].value is False
