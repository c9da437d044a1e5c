"""Tensors read with wrong strides, and rows of the ragged last query tile, are named."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.diagnosis.explain import diagnose
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject

BLOCK_M = 16
# Rows of a head lie apart in q, k and v, as a model projects them.
PROJECTED = Problem(
    H=2, Hk=2, M=20, N=25, D=5, Dv=5, dtype="fp64", layouts=("bshd", "bshd", "bhsd", "bhsd")
)
MIXED = Problem(
    H=2, Hk=2, M=20, N=25, D=5, Dv=5, dtype="fp64", layouts=("bhsd", "bhsd", "bshd", "bhsd")
)
RAGGED = Problem(H=2, Hk=2, M=20, N=25, D=5, Dv=3, dtype="fp64", mask=Mask(causal=True))


def contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


def transposed(x):
    entry, head, row, column = x.stride()
    return x.as_strided(x.shape, (entry, row, head, column))


# Returns q, k and v as a kernel reads them.
READS = {
    "q as contiguous": lambda q, k, v: (contiguous(q), k, v),
    "all as contiguous": lambda q, k, v: (contiguous(q), contiguous(k), contiguous(v)),
    "k by the strides of v": lambda q, k, v: (q, k.as_strided(k.shape, v.stride()), v),
    "q by heads and rows": lambda q, k, v: (transposed(q), k, v),
    # Neighbours: heads in the other order, and rows by the first head's.
    "q of the other head": lambda q, k, v: (q.flip(1), k, v),
    "k of the first head": lambda q, k, v: (q, k[:, :1].expand(k.shape), v),
    "rows backwards": lambda q, k, v: (q, k.flip(2), v),
}


class Stored(torch.autograd.Function):
    """Attention in float64, with gradients of the values that it has read."""

    @staticmethod
    def forward(ctx, q, k, v, seen, scale, fault):
        if fault in READS:
            q, k, v = READS[fault](q, k, v)
        live, used = seen.any(3, keepdim=True), seen.any(2).unsqueeze(3)
        q = torch.where(live, q, 0.0)
        k, v = (torch.where(used, x, 0.0) for x in (k, v))
        out, lse = attended(q, k, v, seen, scale)
        M, N = seen.shape[2:]
        past = -M % BLOCK_M
        tail = torch.arange(M) >= M // BLOCK_M * BLOCK_M
        lost = {"tail lost": -math.inf, "tail lost with an lse of 0": 0.0}
        if fault in lost:
            out = torch.where(tail[:, None], 0.0, out)
            lse = torch.where(tail, lost[fault], lse)
        if fault == "lse of the tail lost":
            lse = torch.where(tail, 0.0, lse)
        if fault.startswith("rows past the end"):
            # Queries of zeros see all keys of a causal mask.
            # All heads of all batch entries follow each other. The first one has none before it.
            mean = v.mean(2, keepdim=True)
            first = (torch.arange(mean.shape[0] * mean.shape[1]) == 0).view(*mean.shape[:2], 1)
            over = (torch.arange(M) < past) & ~first
            before = mean.flatten(0, 1).roll(1, 0).view(mean.shape)
            if fault.endswith("of their own head"):
                before = mean
            out = torch.where(over[..., None], before, out)
            if "lse" in fault:
                lse = torch.where(over, math.log(N), lse)
        ctx.save_for_backward(q, k, v, seen, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, seen, out, lse = ctx.saved_tensors
        s = q @ k.mT * ctx.scale
        p = torch.exp(s - lse.unsqueeze(3)).masked_fill(~seen, 0.0)
        p = torch.where(lse.unsqueeze(3) == -math.inf, 0.0, p)
        live = seen.any(3, keepdim=True)
        dout = torch.where(live, dout, 0.0)
        ds = p * (dout @ v.mT - (out * dout).sum(3, keepdim=True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ dout, None, None, None


def attended(q, k, v, seen, scale):
    s = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    lse = s.logsumexp(3)
    weights = torch.where(seen, torch.exp(s - lse.unsqueeze(3)), 0.0)
    return weights @ v, lse


def subject_of(fault: str) -> Subject:
    def attention(q, k, v, *, mask, sm_scale):
        seen = mask.dense(*q.shape[:3], k.shape[2])
        seen = seen.expand(*q.shape[:3], k.shape[2])
        return Stored.apply(q, k, v, seen, sm_scale, fault)

    attention.gqa, attention.masks, attention.dtypes = False, ("causal",), ("fp64",)
    attention.returns_lse, attention.zero_sizes = True, False
    attention.tiles = lambda problem: (BLOCK_M, BLOCK_M)
    return Subject.of(attention, "stored")


@pytest.mark.parametrize(
    ("fault", "problem", "names"),
    [
        ("", PROJECTED, []),
        ("q as contiguous", PROJECTED, ["read as contiguous"]),
        ("all as contiguous", PROJECTED, ["read as contiguous"]),
        ("k by the strides of v", MIXED, ["strides of another tensor"]),
        ("q by heads and rows", PROJECTED, ["heads and rows exchanged"]),
        ("q of the other head", PROJECTED, []),
        ("k of the first head", PROJECTED, []),
        ("rows backwards", PROJECTED, []),
        ("tail lost", RAGGED, ["tail rows left out"]),
        ("tail lost with an lse of 0", RAGGED, ["tail rows left out"]),
        ("lse of the tail lost", RAGGED, []),
        ("rows past the end", RAGGED, ["rows past the end overwrite"]),
        ("rows past the end and their lse", RAGGED, ["rows past the end overwrite"]),
        ("rows past the end of their own head", RAGGED, []),
    ],
)  # fmt: skip
def test_a_wrong_address_is_named_and_a_neighbouring_fault_is_not(fault, problem, names):
    found = diagnose(subject_of(fault), problem, seconds=60)
    assert [x.name for x in found.explanations] == names
    assert found.complete
