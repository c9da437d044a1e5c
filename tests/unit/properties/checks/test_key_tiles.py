"""Wrong weights of key tiles, and rows that are too large and too small."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.guarantees import CLOSED_FORM, STATISTICS, accuracy, limits
from fa_verify.properties.checks.key_tiles import applies
from fa_verify.properties.execution.trial import Trial, run_trial
from fa_verify.properties.subjects.subject import Subject

LONG = Problem(H=2, Hk=2, M=192, N=1100, D=64, Dv=64, dtype="bf16", seed=5)
LOG2E = 1.4426950408889634


class Tiled:
    """An online softmax over key tiles of 64. A fault changes P or the rescale factor of acc."""

    returns_lse = True
    devices = ("cpu",)

    def __init__(self, of_p=lambda p, tile: p, of_alpha=lambda alpha: alpha) -> None:
        self.of_p, self.of_alpha = of_p, of_alpha

    def __call__(self, q, k, v, *, mask, sm_scale):
        (B, H, M, _), N = q.shape, k.shape[2]
        seen = mask.dense(B, H, M, N)
        scores = (q.float() @ k.float().mT * (sm_scale * LOG2E)).masked_fill(~seen, -torch.inf)
        m, l_sum = torch.full((B, H, M, 1), -torch.inf), torch.zeros(B, H, M, 1)
        acc = torch.zeros(B, H, M, v.shape[3])
        for tile, start in enumerate(range(0, N, 64)):
            part = scores[..., start : start + 64]
            new = torch.maximum(m, part.amax(3, keepdim=True))
            pivot = new.masked_fill(new == -torch.inf, 0.0)
            p, alpha = torch.exp2(part - pivot), torch.exp2(m - pivot)
            l_sum, m = l_sum * alpha + p.sum(3, keepdim=True), new
            acc = acc * self.of_alpha(alpha)
            acc += self.of_p(p, tile).to(q.dtype).float() @ v[..., start : start + 64, :].float()
        live = l_sum > 0
        out = torch.where(live, acc / l_sum.masked_fill(~live, 1.0), 0.0)
        return out.to(q.dtype), torch.where(live, m / LOG2E + l_sum.log(), -torch.inf).squeeze(3)


def trial_of(problem: Problem = LONG, **faults) -> Trial:
    subject = dataclasses.replace(Subject.of(Tiled(**faults), "tiled"), backward=False)
    trial = run_trial(subject, problem)
    assert trial is not None
    return trial


def too_large(p: torch.Tensor, tile: int, factor: float = 1.002) -> torch.Tensor:
    return p * factor if tile == 6 else p


def truncated(p: torch.Tensor, tile: int) -> torch.Tensor:
    """P of a late tile cut to the 16 bits of bfloat16."""
    return (p.view(torch.int32) & ~0xFFFF).view(torch.float32) if tile == 16 else p


def test_a_wrong_weight_of_one_tile_is_found_by_no_other_check():
    trial = trial_of(of_p=too_large)
    (finding,) = limits(trial)
    assert finding.guarantee == "limit of key tiles"
    assert finding.got == pytest.approx(1.002, abs=0.0005)
    assert "all heads, n=384..447" in finding.where
    assert "out of tiled weights keys too much, by a factor" in str(finding)
    others = (accuracy, *STATISTICS.values(), *CLOSED_FORM.values())
    assert not [x for check in others for x in check(trial)]


def test_a_tile_whose_weights_are_truncated_is_found_by_no_other_check():
    trial = trial_of(of_p=truncated)
    (finding,) = limits(trial)
    assert finding.guarantee == "limit of key tiles"
    assert finding.got < 1
    assert "n=1024..1087" in finding.where
    assert not [x for check in (accuracy, *STATISTICS.values()) for x in check(trial)]


def test_the_head_with_a_wrong_weight_is_named():
    def of_head(p: torch.Tensor, tile: int) -> torch.Tensor:
        return torch.cat([p[:, :1], too_large(p[:, 1:], tile, 1.01)], 1)

    (finding,) = limits(trial_of(of_p=of_head))
    assert finding.where == "b=0 h=1, n=384..447"
    assert finding.got == pytest.approx(1.01, abs=0.001)


def test_rescale_factors_of_16_bits_are_found_by_no_other_check():
    """They enlarge some rows and shrink others."""
    problem = dataclasses.replace(LONG, H=4, Hk=4)
    trial = trial_of(problem, of_alpha=lambda alpha: alpha.bfloat16().float())
    (finding,) = limits(trial)
    assert finding.guarantee == "limit of sums"
    assert "has rows that are too large and rows that are too small" in finding.claim
    assert finding.output == "out"
    others = (accuracy, *STATISTICS.values(), *CLOSED_FORM.values())
    assert not [x for check in others for x in check(trial)]


@pytest.mark.parametrize("family", ["normal", "times8", "times40", "massive_channel", "lse_low_90"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_correct_kernel_weights_every_tile(family, dtype):
    for seed, mask in enumerate((Mask(), Mask(causal=True), Mask(window_left=90))):
        problem = Problem(
            H=2, M=64, N=200, D=32, Dv=24, dtype=dtype, inputs=family, mask=mask, seed=seed
        )
        assert not limits(trial_of(problem))


@pytest.mark.parametrize("change", [{"N": 64}, {"M": 46}], ids=str)
def test_few_rows_or_one_tile_show_nothing(change):
    assert applies(LONG)
    assert not applies(dataclasses.replace(LONG, **change))
