"""Families of wide ranges show faults that no smaller scale, rise or gradient shows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import find

from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import problems_of
from fa_verify.properties.running.trial import run_trial


class SomeRows(torch.autograd.Function):
    """The identity, whose backward drops the gradients of the rows that ``kept`` does not take."""

    @staticmethod
    def forward(ctx, out, kept):
        ctx.kept = kept
        return out.clone()

    @staticmethod
    def backward(ctx, dout):
        return torch.where(ctx.kept((dout != 0).any(3)).unsqueeze(3), dout, 0.0), None


def one_run(used):
    """As many rows after the first one as have a gradient: right if they lie side by side."""
    first, row = used.int().argmax(2, keepdim=True), torch.arange(used.shape[2])
    return (row >= first) & (row < first + used.sum(2, keepdim=True))


def until_a_tile_of_zeros(used):
    """The rows before the first tile of 16 that has no gradient, and follows one that has."""
    tiles = torch.nn.functional.pad(used, (0, -used.shape[2] % 16)).unflatten(2, (-1, 16)).any(3)
    ended = tiles.cummax(2).values & ~tiles
    return ~ended.cummax(2).values.repeat_interleave(16, 2)[..., : used.shape[2]]


def weights_of_tiles(scores):
    """Put off a rescale until a tile's maximum exceeds that of the tile before by 8 powers of 2."""
    parts, total, m, last = [], 0.0, None, None
    for tile in scores.split(16, 3):
        top = tile.amax(3, keepdim=True).detach()
        if last is None:
            m = last = top
        top = torch.maximum(top, last)
        risen = torch.where(top - last > 8 * math.log(2), top, m)
        parts = [part * (m - risen).exp() for part in parts] + [(tile - risen).exp()]
        total = total * (m - risen).exp() + parts[-1].sum(3, keepdim=True)
        m, last = risen, top
    return torch.cat(parts, 3) / total


def weights_by_shifts(scores):
    """Convert exponents to fixed point by shifts, of which the hardware takes the last 5 bits."""
    below = scores - scores.amax(3, keepdim=True)
    exact = below.detach()
    places = 1 - torch.frexp(exact).exponent
    shifted = torch.ldexp(exact, torch.where(exact == 0, 0, places.clamp(min=0) // 32 * 32))
    return (below + torch.where(places > 126, 0.0, shifted) - exact).softmax(3)


# Part of the kernel to its function: "scale", "weights" of scores, and "rows" with a gradient.
FAULTS = {
    "a limit on the scale": {"scale": lambda scale: min(scale, 100.0)},
    "a maximum that is compared with the tile before": {"weights": weights_of_tiles},
    "a shift past 31 bits": {"weights": weights_by_shifts},
    "one run of rows": {"rows": one_run},
    "a tile of zeros ends the backward": {"rows": until_a_tile_of_zeros},
}
LONG = Problem(M=90, N=400, D=8, Dv=8, dtype="bf16", seed=1)
PROBLEMS = {
    "a limit on the scale": {"inputs": "cosine", "sm_scale": 128.0},
    "a maximum that is compared with the tile before": {"inputs": "rising_max"},
    "a shift past 31 bits": {"inputs": "swept_scores"},
    "one run of rows": {"dout": "masked"},
    "a tile of zeros ends the backward": {"dout": "masked", "seed": 3},
}


def subject(fault):
    parts = FAULTS.get(fault, {})

    def kernel(q, k, v, *, mask, sm_scale):
        scale = parts.get("scale", float)(sm_scale)
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        weights = parts.get("weights", lambda scores: scores.softmax(3))(q @ k.mT * scale)
        out = weights @ v
        return SomeRows.apply(out, parts["rows"]) if "rows" in parts else out

    def attention(q, k, v, **given):
        return kernel(q, k, v, **given).to(q.dtype)

    attention.p_dtype, attention.masks, attention.gqa = "fp32", (), False
    attention.zero_sizes = False
    return Subject.of(attention, fault or "right")


def changed(fields):
    return Problem(**{**vars(LONG), **fields})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_family_finds_a_fault_that_ordinary_data_do_not(fault):
    wrong, problem = subject(fault), changed(PROBLEMS[fault])
    assert accuracy(run_trial(wrong, problem))
    assert accuracy(run_trial(subject(""), problem)) == []
    assert accuracy(run_trial(wrong, LONG)) == []
    # Neither do the ranges that ended earlier.
    for before in (
        {"inputs": "times40"}, {"inputs": "cosine", "sm_scale": 2.0}, {"dout": "one_hot"},
        {"inputs": "near_ties"}, {"inputs": "rising_max", "N": 180}, {"inputs": "tiny_q"},
    ):  # fmt: skip
        assert accuracy(run_trial(wrong, changed(before))) == []


@pytest.mark.parametrize("fault", ["a limit on the scale", "one run of rows"])
def test_faults_of_scales_and_rows_are_drawn_for(fault):
    wrong = subject(fault)
    drawn = problems_of(wrong, dtype="fp32", device="cpu", max_seqlen=48, max_cost=9)

    def is_found(problem):
        trial = run_trial(wrong, problem)
        return trial is not None and bool(accuracy(trial))

    smallest = find(drawn, is_found)
    assert smallest.inputs == "cosine" or smallest.dout in ("masked", "one_row_of_a_tile")


@pytest.mark.parametrize("dout", ["masked", "one_row_of_a_tile"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("inputs", ["cosine", "rising_max", "swept_scores"])
@pytest.mark.parametrize("seed", [1, 3])
def test_a_right_kernel_holds_at_the_ends_of_the_ranges(inputs, dtype, dout, seed):
    scale = 128.0 if inputs == "cosine" else None
    fields = {"inputs": inputs, "dout": dout, "dtype": dtype, "seed": seed, "sm_scale": scale}
    trial = run_trial(subject(""), changed(fields))
    assert trial is not None
    assert accuracy(trial) == []
