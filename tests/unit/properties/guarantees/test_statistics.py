"""Mean square and mean of errors: faults within the bound are found, a correct kernel passes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fa_verify import verify
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.statistics import bias, is_valid, mean_square_limit, rms
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import AttentionTrial, run_trial
from fa_verify.properties.search.search import Runner
from tests.unit.oracles.bounds.emulated_kernel import CASTS, Case, Emulated

PROBLEM = Problem(H=4, Hk=2, M=96, N=128, D=32, Dv=24, dtype="bf16", seed=1)
DIGITS = {"fp16": 11, "bf16": 8}


def truncated(x: np.ndarray, digits: int) -> np.ndarray:
    """x truncated toward zero to ``digits`` binary digits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(mantissa, digits)), exponent - digits).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faulty(Emulated):
    """An emulated kernel with small faults: each error is near or below its bound."""

    def cast(self, x: np.ndarray) -> np.ndarray:
        if self.fault == "P and dS truncated":
            return truncated(x, DIGITS[self.dtype])
        rounded = super().cast(x)
        if self.fault == "one key in eight truncated":
            rounded[:, ::8] = truncated(x[:, ::8], DIGITS[self.dtype])
        return rounded

    def store(self, x: np.ndarray) -> np.ndarray:
        if self.fault == "outputs truncated":
            return truncated(x, DIGITS[self.dtype])
        return super().store(x)

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        step = {
            "low-precision backward": CASTS[self.dtype],
            "truncating accumulator": lambda x: truncated(x, 24 - 6),
        }.get(self.fault)
        if step is None:
            return super().dot(a, b)
        total = np.zeros((len(a), b.shape[1]), a.dtype)
        for start in range(0, a.shape[1], 16):
            total = step(total + a[:, start : start + 16] @ b[start : start + 16])
        return total

    def scores(self, q: np.ndarray, k: np.ndarray, t: float):
        return Emulated.scores(replace(self, fault=""), q, k, t)

    def forward(self, s2: np.ndarray, v: np.ndarray, seen: np.ndarray):
        """The forward pass, without a fault that belongs to the backward pass."""
        if self.fault == "low-precision backward":
            return replace(self, fault="").forward(s2, v, seen)
        out, lse = super().forward(s2, v, seen)
        if self.fault == "out rounded twice":
            out = CASTS[self.dtype](CASTS["bf16"](out))
        return out, lse

    def head(self, q, k, v, dout, dlse, seen, t: float) -> tuple[np.ndarray, ...]:
        """The head's gradients; faults of delta enter through dlse, which is subtracted from it."""
        if self.fault == "delta summed in 16 bits":
            out, _ = self.forward(self.scores(q, k, t)[0], v, seen)
            delta = np.zeros(len(out), out.dtype)
            for column in range(out.shape[1]):
                delta = CASTS[self.dtype](delta + out[:, column] * dout[:, column])
            dlse = dlse + (out * dout).sum(axis=1) - delta
        return super().head(q, k, v, dout, dlse, seen, t)


class _Attention(torch.autograd.Function):
    """An emulated kernel whose backward repeats the forward."""

    @staticmethod
    def forward(ctx, kernel, mask, sm_scale, q, k, v):
        ctx.save_for_backward(q, k, v)
        ctx.kernel = lambda *tensors: kernel(
            Case(tuple(x.double().numpy() for x in tensors), mask, sm_scale, kernel.dtype)
        )
        got = ctx.kernel(q, k, v, q.new_zeros((*q.shape[:3], v.shape[3])))
        lse = torch.from_numpy(got.lse)
        ctx.mark_non_differentiable(lse)
        return torch.from_numpy(got.out).to(q.dtype), lse

    @staticmethod
    def backward(ctx, dout, _):
        got = ctx.kernel(*ctx.saved_tensors, dout)
        return None, None, None, *(torch.from_numpy(x).to(dout.dtype) for x in got[2:])


def subject(kernel: Emulated) -> Subject:
    return Subject(
        name="emulated",
        call=lambda q, k, v, *, mask, sm_scale: _Attention.apply(kernel, mask, sm_scale, q, k, v),
        returns_lse=True,
        numerics=kernel.numerics,
    )


def run(problem: Problem, fault: str = "", **numerics: object) -> AttentionTrial:
    kernel = Faulty(dtype=problem.dtype, fault=fault, numerics=Numerics(**numerics))
    trial = run_trial(subject(kernel), problem)
    assert trial is not None
    return trial


def share_of_bound(trial: AttentionTrial) -> float:
    """The largest error / bound over all outputs."""
    return max(peak for part in trial.peaks for peak in part.values())


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    B, Hk, G = (int(x) for x in rng.integers(1, 3, 3))
    M, N = (int(x) for x in rng.integers(16, 130, 2))
    D, Dv = (int(x) for x in rng.choice([8, 24, 64], 2))
    left, right = (None if rng.integers(2) else int(x) for x in rng.integers(0, 20, 2))
    mask = Mask(causal=True) if seed % 3 == 0 else Mask(window_left=left, window_right=right)
    if rng.integers(2):
        queries, keys = rng.integers(0, M + 1, B), rng.integers(0, N + 1, B)
        lengths = {"seqlens_q": queries.tolist(), "seqlens_k": keys.tolist()}
        mask = replace(mask, **lengths)
    return Problem(
        **{"B": B, "H": Hk * G, "Hk": Hk, "M": M, "N": N, "D": D, "Dv": Dv, "seed": seed},
        dtype=("fp16", "bf16")[seed % 2],
        mask=mask,
        sm_scale=float(rng.choice([0.12, 0.4, 1.0, 1.9])) * D**-0.5,
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("fault", "check", "outputs"),
    [
        ("P and dS truncated", rms, {"out", "dq", "dk", "dv"}),
        ("P and dS truncated", bias, {"out", "dq", "dk", "dv"}),
        ("one key in eight truncated", bias, {"out", "dq"}),
        ("outputs truncated", rms, {"out", "dq", "dk", "dv"}),
        ("outputs truncated", bias, {"out", "dq", "dk", "dv"}),
        ("low-precision backward", rms, {"dq", "dk", "dv"}),
    ],
)
def test_a_fault_within_the_bound_is_caught(fault, check, outputs, dtype):
    trial = run(replace(PROBLEM, dtype=dtype), fault)
    assert share_of_bound(trial) < 1
    assert outputs <= {finding.output for finding in check(trial)}


@pytest.mark.parametrize(("fault", "guarantee"), [("outputs truncated", "RMS"), ("", None)])
def test_the_verdict_on_any_claim_holds_the_averages_of_errors_too(fault, guarantee):
    runner = Runner(subject(Faulty(dtype="bf16", fault=fault)), Tally())
    found = runner.findings(PROBLEM, lambda trial: [])
    assert guarantee in {x.guarantee for x in found} if guarantee else found == []


def test_a_verified_subject_has_the_averages_of_errors_too():
    report = verify(subject(Faulty(dtype="bf16", fault="outputs truncated")), problems=[PROBLEM])
    assert {"RMS", "bias"} <= {finding.guarantee for finding in report.findings}
    # They are reported beside the findings of the requested guarantees.
    wrong = subject(Faulty(dtype="bf16", fault="delta left out"))
    report = verify(wrong, problems=[PROBLEM], guarantees=("G1",))
    assert {"G1 accuracy", "RMS"} <= {finding.guarantee for finding in report.findings}


def test_a_second_rounding_of_out_is_caught():
    trial = run(replace(PROBLEM, dtype="fp16"), "out rounded twice")
    assert "out" in {finding.output for finding in rms(trial)}


def test_a_delta_summed_in_16_bits_is_caught():
    trial = run(replace(PROBLEM, M=256, N=40, Dv=64), "delta summed in 16 bits")
    assert share_of_bound(trial) < 1
    assert "dq" in {finding.output for finding in rms(trial)}


def test_nan_is_flagged():
    trial = run(PROBLEM)
    trial.got.dk[0, 0, 3, 2] = math.nan
    assert [finding.output for finding in rms(trial)] == ["dk"]
    assert [finding.output for finding in bias(trial)] == ["dk"]


def test_rows_and_keys_with_few_pairs_do_not_count():
    trial = run(replace(PROBLEM, M=64, N=64, mask=Mask(causal=True)))
    trial.got.out[:, :, :7] = trial.got.dq[:, :, :7] = 100.0
    trial.got.dk[:, :, -3:] = trial.got.dv[:, :, -3:] = 100.0  # 2, 4 and 6 rows of two heads
    assert rms(trial) + bias(trial) == []
    trial.got.out[0, 0, 7] = trial.got.dk[0, 0, -4] = 100.0
    assert [finding.output for finding in rms(trial)] == ["out", "dk"]


@pytest.mark.parametrize(
    "outside",
    [
        {"dtype": "fp32"},
        {"inputs": "constant"},
        {"dout": "one_hot"},
        {"D": 7},
        {"Dv": 7},
        {"sm_scale": 1.0},
        {"sm_scale": 0.001},
        {"layouts": ("bhsd", "bhsd", "expanded", "bhsd")},
    ],
    ids=str,
)
def test_problems_outside_the_model_are_left_alone(outside):
    trial = run(PROBLEM)
    broken = trial.got._replace(out=trial.got.out + 1)
    assert rms(replace(trial, got=broken)) != []
    assert not is_valid(replace(PROBLEM, **outside))
    elsewhere = replace(trial, problem=replace(PROBLEM, **outside), got=broken)
    assert rms(elsewhere) + bias(elsewhere) == []


@pytest.mark.parametrize("samples", [1, 10, 1000])
def test_the_limit_is_rarely_exceeded_by_squares_of_normal_errors(samples):
    # A rate of exp(-18) cannot be measured by an affordable sample; exp(-5) can.
    squares = np.random.default_rng(0).standard_normal((10_000, samples)) ** 2
    x = 5.0
    limit = 1 + 2 * math.sqrt(x / samples) + 2 * x / samples
    assert float((squares.mean(1) > limit).mean()) < math.exp(-x)
    assert mean_square_limit(samples) > limit


def test_a_finding_names_the_row_that_contributes_most():
    trial = run(PROBLEM)
    trial.got.dq[0, 3, 17] += 10.0
    (finding,) = rms(trial)
    assert str(finding).startswith(
        "RMS: dq of emulated has larger errors than its roundings explain"
    )
    assert "mean over 384 rows: got " in str(finding)
    assert "the worst, b=0 h=3 m=17, has " in str(finding)
    assert f"\n  {finding.bad} of 384 rows are bad (" in str(finding)
    assert 1 < finding.bad < 20


def test_a_truncating_accumulator_drifts_no_further_than_it_declares():
    problem = replace(PROBLEM, dtype="fp16", H=1, Hk=1, M=256, N=2048, Dv=64)
    fault = "truncating accumulator"
    assert bias(run(problem, fault, accumulator=64.0)) == []
    assert bias(run(problem, fault)) != []


@pytest.mark.parametrize("seed", range(40))
def test_a_correct_kernel_is_not_flagged(seed):
    trial = run(random_problem(seed), block_n=(16, 32, 64)[seed % 3])
    assert is_valid(trial.problem)
    assert [str(finding) for finding in rms(trial) + bias(trial)] == []
