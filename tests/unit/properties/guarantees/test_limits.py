"""Elements and sums held to the spread of independent roundings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.bounds import spread
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import accuracy, backward, limits
from fa_verify.properties.guarantees.limits import (
    FAMILIES,
    applies,
    judged_elements,
    outside,
    spreads_of,
)
from fa_verify.properties.guarantees.statistics import bias, rms
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_trial
from tests.unit.properties.kernels.flash_attention_2 import FlashAttention2

PROBLEM = Problem(M=192, N=160, D=64, Dv=64, dtype="bf16", seed=3)
OTHERS = (accuracy, backward, rms, bias)


def trial_of(problem: Problem = PROBLEM, **options: object) -> AttentionTrial:
    trial = run_trial(Subject.of(FlashAttention2(**options), "emulated"), problem)
    assert trial is not None
    return trial


def faulty(trial: AttentionTrial, name: str, change) -> AttentionTrial:
    """The trial with a change of an output, which gets the unrounded one or a close value."""
    changed = change(getattr(trial.got, name).double()).to(getattr(trial.got, name).dtype)
    return dataclasses.replace(trial, got=trial.got._replace(**{name: changed}))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_correct_kernel_keeps_the_limits(family, dtype):
    for seed, mask in enumerate((Mask(), Mask(causal=True), Mask(window_left=30))):
        problem = Problem(
            H=2, M=97, N=130, D=40, Dv=24, dtype=dtype, inputs=family, mask=mask, seed=seed
        )
        trial = run_trial(Subject.of(FlashAttention2(), "emulated"), problem)
        assert trial is None or not limits(trial)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("conversion", ["truncate", "nearest", "nearest_away"])
def test_a_correct_tf32_kernel_keeps_the_limits(family, conversion):
    kernel = Subject.of(FlashAttention2(tf32_conversion=conversion), "emulated")
    for seed, mask in enumerate((Mask(causal=True), Mask(window_left=60))):
        problem = Problem(
            H=2, M=65, N=98, D=40, Dv=24, dtype="fp32", inputs=family, mask=mask, seed=seed
        )
        trial = run_trial(kernel, problem)
        assert trial is None or not [x for check in (limits, *OTHERS) for x in check(trial)]


def test_long_sums_may_lose_what_tensor_cores_truncate(monkeypatch):
    kernel = Subject.of(FlashAttention2(tf32_conversion="nearest"), "emulated")
    trial = run_trial(kernel, Problem(M=6000, N=40, D=16, Dv=16, dtype="fp32", seed=1))
    assert trial is not None
    assert not limits(trial)
    monkeypatch.setattr(spread, "_STEP_TF32", 10**6)
    assert {finding.output for finding in limits(trial)} == {"dv"}


@pytest.mark.parametrize(
    ("fault", "outputs"),
    [
        ("one tile of P times 1 + 2**-9", {"dv"}),
        ("one tile of dS times 1 + 2**-9", {"dq", "dk"}),
        ("k converted in another way", {"dq", "dk", "dv"}),
    ],
)
def test_a_fault_of_a_tf32_kernel_is_found_where_the_conversion_is_declared(fault, outputs):
    kernel = Subject.of(FlashAttention2(fault, tf32_conversion="truncate"), "faulty")
    problem = dataclasses.replace(PROBLEM, dtype="fp32")
    trial = run_trial(kernel, problem)
    assert trial is not None
    for check in (limits, backward):
        assert {finding.output for finding in check(trial)} == outputs
    unknown = dataclasses.replace(kernel.numerics, tf32_conversion="unknown")
    trial = run_trial(dataclasses.replace(kernel, numerics=unknown), problem)
    assert trial is not None
    assert not [x for check in (limits, *OTHERS) for x in check(trial)]


def test_a_kernel_that_declares_another_conversion_to_tf32_fails():
    for declared, computed in (("nearest", "truncate"), ("truncate", "nearest_away")):
        kernel = Subject.of(FlashAttention2(tf32_conversion=computed), "other")
        numerics = dataclasses.replace(kernel.numerics, tf32_conversion=declared)
        problem = dataclasses.replace(PROBLEM, dtype="fp32")
        trial = run_trial(dataclasses.replace(kernel, numerics=numerics), problem)
        assert trial is not None
        assert {x.output for x in limits(trial)} == {"out", "lse", "dq", "dk", "dv"}


def test_the_gradients_of_a_kernel_that_returns_no_lse_have_no_limits():
    """They depend on an lse that is not known."""
    kernel = FlashAttention2()

    def attention(q, k, v, *, mask, sm_scale):
        return kernel(q, k, v, mask=mask, sm_scale=sm_scale)[0]

    trial = run_trial(Subject.of(attention, "emulated"), PROBLEM)
    assert trial is not None
    assert spreads_of(trial).keys() == {"out"}


def test_grouped_heads_keep_the_limits():
    problem = Problem(B=2, H=6, Hk=2, M=64, N=70, D=32, Dv=32, dtype="fp16", seed=5)
    trial = run_trial(Subject.of(FlashAttention2(), "emulated"), problem)
    assert trial is not None
    assert not limits(trial)


class Forward:
    """The forward alone. P and out are changed before they are rounded."""

    returns_lse = True
    devices = ("cpu",)

    def __init__(self, of_p=lambda p: p, of_out=lambda out: out) -> None:
        self.of_p, self.of_out = of_p, of_out

    def __call__(self, q, k, v, *, mask, sm_scale):
        scores = q.float() @ k.float().mT * sm_scale
        m = scores.amax(3, keepdim=True)
        p = (scores - m).exp()
        total = p.sum(3, keepdim=True)
        out = self.of_p(p).to(q.dtype).float() @ v.float() / total
        return self.of_out(out).to(q.dtype), (m + total.log()).squeeze(3)


def truncated_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q k' in float32, where each product is cut off at the spacing of the larger operand."""
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for d in range(q.shape[3]):
        product = q[..., d, None].double() * k[..., None, :, d].double()
        largest = torch.maximum(total.abs(), product.abs()).clamp(min=2.0**-100)
        spacing = 2.0 ** (largest.log2().floor() - 23)
        total = (total / spacing).trunc() * spacing + (product / spacing).trunc() * spacing
    return total.float()


class TruncatedProducts:
    """The forward alone, with scores as tensor cores without spare bits compute them."""

    returns_lse = True
    devices = ("cpu",)

    def __call__(self, q, k, v, *, mask, sm_scale):
        scores = truncated_scores(q, k).double() * sm_scale
        m = scores.amax(3, keepdim=True)
        p = (scores - m).exp().float()
        total = p.sum(3, keepdim=True)
        out = p.to(q.dtype).float() @ v.float() / total
        return out.to(q.dtype), (m + total.double().log()).squeeze(3).float()


def test_products_beside_a_dominant_one_may_lose_what_tensor_cores_truncate(monkeypatch):
    subject = dataclasses.replace(Subject.of(TruncatedProducts(), "truncated"), backward=False)
    problem = Problem(
        B=32, H=2, M=128, N=64, D=64, Dv=64, dtype="fp16", sm_scale=1.42, inputs="lse_low_6e3"
    )
    trial = run_trial(subject, problem)
    assert trial is not None
    assert not limits(trial)
    monkeypatch.setattr(
        spread, "_truncation_of_products", lambda value, *_: torch.zeros_like(value)
    )
    found = limits(trial)
    assert {(x.output, x.guarantee) for x in found} == {("out", "limit of sums")}


def forward_trial(dtype: str, **changes) -> AttentionTrial:
    subject = dataclasses.replace(Subject.of(Forward(**changes), "changed"), backward=False)
    trial = run_trial(subject, dataclasses.replace(PROBLEM, dtype=dtype))
    assert trial is not None
    return trial


def found(trial: AttentionTrial) -> list[str]:
    return [finding.guarantee for finding in limits(trial)]


@pytest.mark.parametrize(
    ("dtype", "factor", "rows", "unit"),
    [
        ("fp16", 1.0015, slice(70, 71), "m=70"),
        ("bf16", 1.01, slice(70, 71), "m=70"),
        ("fp32", 1.00001, slice(None), "all elements"),
        ("fp32", 1.00001, slice(64, 128), "m=64..127"),
        ("fp32", 1.00001, slice(70, 71), "m=70"),
    ],
)
def test_a_small_factor_of_out_is_found_where_no_other_check_finds_it(dtype, factor, rows, unit):

    def scaled(out: torch.Tensor) -> torch.Tensor:
        out[:, :, rows] *= factor
        return out

    trial = forward_trial(dtype, of_out=scaled)
    (finding,) = limits(trial)
    assert finding.guarantee == "limit of sums"
    assert unit in finding.where
    assert finding.got == pytest.approx(factor, abs=0.5 * (factor - 1))
    assert "out of changed is too large by a factor" in str(finding)
    assert not [x for check in OTHERS for x in check(trial)]


def test_rows_that_are_too_large_and_too_small_by_turns_are_found():

    def by_turns(out: torch.Tensor) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(out.shape[2]) % 2)
        return out * (1 + 3e-6 * signs[:, None])

    trial = trial_of(dataclasses.replace(PROBLEM, dtype="fp32"))
    (finding,) = limits(faulty(trial, "out", by_turns))
    assert finding.output == "out"
    assert "rows that are too large and rows that are too small" in finding.claim


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_element_outside_its_limit_is_found_where_the_bound_does_not_find_it(name):
    trial = trial_of(dataclasses.replace(PROBLEM, dtype="fp32"))
    bound = getattr(trial.judgement.bound, name)

    def moved(x: torch.Tensor) -> torch.Tensor:
        x[0, 0, 5, 3] = getattr(trial.want, name)[0, 0, 5, 3] + 0.9 * bound[0, 0, 5, 3]
        return x

    (finding,) = [x for x in limits(faulty(trial, name, moved)) if "elements" in x.guarantee]
    assert (finding.output, finding.where, finding.bad) == (name, "b=0 h=0 "
        f"{'m' if name in ('out', 'dq') else 'n'}=5 d=3", 1)  # fmt: skip
    assert not accuracy(faulty(trial, name, moved))


def test_digits_that_a_split_dot_drops_are_found():
    """P keeps 17 of its 24 bits in an fp32 kernel, as where a small product is left out."""

    def cut(p: torch.Tensor) -> torch.Tensor:
        return (p.view(torch.int32) & ~0x7F).view(torch.float32)

    trial = forward_trial("fp32", of_p=cut)
    assert found(trial) == ["limit of sums"]
    assert not [x for check in OTHERS for x in check(trial)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_an_lse_off_by_a_constant_is_found_where_no_other_check_finds_it(dtype):
    long = dataclasses.replace(PROBLEM, M=100, N=1500, dtype=dtype)
    subject = dataclasses.replace(Subject.of(Forward(), "changed"), backward=False)
    trial = run_trial(subject, long)
    assert trial is not None
    assert not limits(trial)
    wrong = faulty(trial, "lse", lambda lse: lse + 5e-5)
    found = {finding.guarantee: finding for finding in limits(wrong)}
    assert found["limit of elements"].output == found["limit of sums"].output == "lse"
    assert "lse of changed is too large by a constant" in str(found["limit of sums"])
    assert found["limit of sums"].got == pytest.approx(5e-5, rel=0.1)
    assert not [x for check in OTHERS for x in check(wrong)]


def test_the_mean_of_lse_has_a_narrower_limit_than_its_elements():
    """A softmax sum in any order has a random error, which differs from row to row."""
    long = dataclasses.replace(PROBLEM, M=100, N=1500, dtype="fp32")
    subject = dataclasses.replace(Subject.of(Forward(), "changed"), backward=False)
    trial = run_trial(subject, long)
    assert trial is not None
    limit = float(spreads_of(trial)["lse"].limit.min())
    wrong = faulty(trial, "lse", lambda lse: lse + 0.7 * limit)
    assert [finding.guarantee for finding in limits(wrong)] == ["limit of sums"]


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, seqlens_q=(80,))])
def test_rows_without_a_visible_key_have_no_lse_to_judge(mask):
    problem = dataclasses.replace(PROBLEM, M=90, N=40, mask=mask)
    trial = trial_of(problem)
    assert bool((trial.want.lse == -torch.inf).any())
    assert not limits(trial)
    assert limits(faulty(trial, "lse", lambda lse: lse + 1.0))


def test_gradients_are_judged_only_given_a_forward_within_its_bound():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    both = faulty(faulty(trial_of(), "out", doubled), "dq", doubled)
    assert {finding.output for finding in limits(both)} == {"out"}


def test_a_backward_that_reads_nothing_is_not_judged():
    class Unread(FlashAttention2):
        backward_reads = ()

    trial = run_trial(Subject.of(Unread(), "unread"), PROBLEM)
    assert trial is not None
    wrong = faulty(trial, "dq", lambda x: 2 * x)
    assert not limits(wrong)
    assert accuracy(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp64"},
        {"inputs": "constant"},
        {"inputs": "large_mean_v"},
        {"inputs": "needle_visible"},
        {"dout": "constant"},
        {"layouts": ("expanded", "bhsd", "bhsd", "bhsd")},
        {"D": 4},
        {"Dv": 4},
        {"sm_scale": 0.001},
        {"softcap": 10.0},
        {"alibi": "halving"},
        {"bias": "normal/bn"},
    ],
    ids=str,
)
def test_problems_whose_roundings_may_agree_are_not_judged(change):
    assert applies(PROBLEM, Numerics())
    assert not applies(dataclasses.replace(PROBLEM, **change), Numerics())


@pytest.mark.parametrize(
    "declared",
    [
        {"dots": "tf32"}, {"dots": "tf32", "tf32_conversion": "truncate", "prescales": "q"},
        {"prescales": "q"}, {"ds_roundings": 2}, {"ds_from": "rounded"},
    ],
    ids=str,
)  # fmt: skip
def test_kernels_with_other_roundings_are_not_judged(declared):
    assert not applies(PROBLEM, Numerics(**declared))


def test_the_elements_that_are_judged_are_counted():
    of = Subject.of(FlashAttention2(), "emulated")
    counts = PROBLEM.elements
    assert judged_elements(of, PROBLEM, counts) == sum(counts.values())
    assert judged_elements(of, dataclasses.replace(PROBLEM, inputs="constant"), counts) == 0
    forward = counts["out"] + counts["lse"]
    assert judged_elements(of, PROBLEM, ("out", "lse")) == forward
    assert judged_elements(dataclasses.replace(of, backward=False), PROBLEM, counts) == forward
    without_lse = dataclasses.replace(of, returns_lse=False)
    assert judged_elements(without_lse, PROBLEM, ("out", "dq", "dk", "dv")) == counts["out"]
    # A kernel that returns no lse need not declare it.
    assert judged_elements(of, PROBLEM, ("out", "dq", "dk", "dv")) == counts["out"]
    trial = trial_of()
    assert sum(x.numel() for x in trial.got if x is not None) == sum(counts.values())


def test_nan_is_outside_every_limit():
    def with_nan(x: torch.Tensor) -> torch.Tensor:
        x[0, 0, 1, 1] = torch.nan
        return x

    guarantees = found(faulty(trial_of(), "out", with_nan))
    assert guarantees == ["limit of elements", "limit of sums"]


@pytest.mark.parametrize("term", ["shared", "of_sums"])
def test_a_limit_that_is_nan_holds_no_sum(term):
    trial = trial_of()
    spreads = spreads_of(trial)
    spread = spreads["dq"]
    broken = getattr(spread, term).clone()
    broken[0, 0, 7] = torch.nan
    spreads["dq"] = spread._replace(**{term: broken})
    assert [(x.guarantee, x.output) for x in outside(trial, spreads)] == [("limit of sums", "dq")]
