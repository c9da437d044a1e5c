"""The order of scale, softcap, ALiBi and bias is named where a kernel has another one."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.diagnosis.explain import diagnose
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject

MODIFIED = Problem(
    H=2, Hk=1, M=9, N=13, D=5, Dv=3, dtype="fp64", mask=Mask(causal=True), softcap=1.5,
    alibi="normal", bias="normal/bhmn",
)  # fmt: skip


def subject_of(order: str) -> Subject:
    """Attention in float64 whose scores are made in some order."""

    def attention(q, k, v, *, mask, sm_scale, softcap=None, alibi_slopes=None, bias=None):
        B, H, M, N = *q.shape[:3], k.shape[2]
        seen = mask.dense(B, H, M, N)
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        dots = q.double() @ k.double().mT
        linear = bends = 0.0
        if alibi_slopes is not None:
            rows, keys = (torch.tensor(x).view(-1, 1, 1, 1) for x in mask.lengths(B, M, N))
            distance = (torch.arange(M).view(-1, 1) + keys - rows - torch.arange(N)).abs()
            linear = -alibi_slopes.expand(B, H)[:, :, None, None].double() * distance
        if bias is not None:
            bends = torch.where(seen, bias, 0.0).double()

        def cap(x):
            return x if softcap is None else softcap * torch.tanh(x / softcap)

        scores = {
            "right": lambda: cap(dots * sm_scale) + linear + bends,
            "cap of all": lambda: cap(dots * sm_scale + linear + bends),
            "cap of the bias": lambda: cap(dots * sm_scale + bends) + linear,
            "cap of ALiBi": lambda: cap(dots * sm_scale + linear) + bends,
            "cap of the dots": lambda: cap(dots) * sm_scale + linear + bends,
            "bias scaled": lambda: cap(dots * sm_scale) + linear + bends * sm_scale,
            "ALiBi scaled": lambda: cap(dots * sm_scale) + linear * sm_scale + bends,
            "all scaled": lambda: cap(dots * sm_scale) + (linear + bends) * sm_scale,
            "bias capped": lambda: cap(dots * sm_scale) + linear + cap(bends),
            "scaled twice with a bias":
                lambda: cap(dots * sm_scale ** (1 if bias is None else 2)) + linear + bends,
            "cap of a cap": lambda: cap(cap(dots * sm_scale)) + linear + bends,
        }[order]()  # fmt: skip
        live = seen.any(3, keepdim=True)
        weights = torch.where(live, scores.masked_fill(~seen, -math.inf), 0.0).softmax(3)
        return (torch.where(seen, weights, 0.0) @ v.double()).to(q.dtype)

    attention.score_mods = ("softcap", "alibi", "bias")
    attention.p_dtype, attention.p_normalised = "fp32", True
    return Subject.of(attention, "attention")


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("cap of all", ["softcap of the sum"]), ("cap of the bias", ["softcap of the sum"]),
        ("cap of ALiBi", ["softcap of the sum"]), ("cap of the dots", ["softcap before the scale"]),
        ("bias scaled", ["bias scaled"]), ("ALiBi scaled", ["ALiBi scaled"]),
        ("right", []), ("all scaled", []), ("bias capped", []), ("cap of a cap", []),
        # The problem without score modifications passes.
        ("scaled twice with a bias", []),
    ],
)  # fmt: skip
def test_an_order_of_score_modifications_is_named(order, names):
    found = diagnose(subject_of(order), MODIFIED, seconds=60)
    assert [x.name for x in found.explanations] == names
    assert found.complete


def test_a_softcap_of_the_sum_is_named_by_a_bias_alone():
    problem = Problem(M=3, N=4, softcap=1.0, bias="normal/bhmn", dtype="fp64")
    found = diagnose(subject_of("cap of all"), problem, seconds=60)
    assert [x.name for x in found.explanations] == ["softcap of the sum"]
