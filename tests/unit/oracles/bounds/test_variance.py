"""Predicted variances match an emulated kernel that rounds where the model assumes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.variance import Variances, rounding, variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs, make
from tests.unit.oracles.bounds.emulated_kernel import Case, Emulated

SEEDS = range(6)
PROBLEM = Problem(H=4, Hk=2, M=64, N=80, D=32, Dv=24, dtype="bf16")
OUTPUTS = ("out", "dq", "dk", "dv")


def predict(problem: Problem, numerics: Numerics, **chosen: int) -> Variances:
    return variances(
        *make(problem),
        mask=problem.mask,
        sm_scale=problem.scale,
        in_dtype=problem.dtype,
        numerics=numerics,
        **chosen,
    )


def emulated(problem: Problem, kernel: Emulated) -> tuple[Outputs, Inputs]:
    inputs = make(problem)
    arrays = tuple(x.double().numpy() for x in inputs.tensors)
    return kernel(Case(arrays, problem.mask, problem.scale, problem.dtype)), inputs


def observed(problem: Problem, kernel: Emulated) -> dict[str, float]:
    """Observed over predicted root mean square error of an emulated kernel, over several seeds."""
    squares = dict.fromkeys(OUTPUTS, 0.0)
    for seed in SEEDS:
        drawn = replace(problem, seed=seed)
        got, inputs = emulated(drawn, kernel)
        want = attention(*inputs, mask=drawn.mask, sm_scale=drawn.scale)
        predicted = predict(drawn, kernel.numerics)
        for name in OUTPUTS:
            variance = getattr(predicted, name)
            error = torch.from_numpy(getattr(got, name)) - getattr(want, name)
            moves = variance > 0
            squares[name] += float((error[moves].square() / variance[moves]).mean())
    return {name: (total / len(SEEDS)) ** 0.5 for name, total in squares.items()}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"block_n": 64},
        {"p_dtype": "fp32"},
        {"p_normalised": True},
        {"l_from": "rounded"},
        {"ds_scaled": True},
        {"group_sum": "dtype"},
    ],
    ids=str,
)
def test_a_correct_kernel_errs_as_predicted_whatever_it_declares(dtype, declared):
    kernel = Emulated(dtype=dtype, numerics=Numerics(**declared))
    ratios = observed(replace(PROBLEM, dtype=dtype), kernel)
    assert {name: ratio for name, ratio in ratios.items() if not 0.93 < ratio < 1.05} == {}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_a_split_kernel_errs_no_more_than_predicted(dtype, splits):
    """The error is slightly smaller, because the largest P of every split is 1, which is exact."""
    kernel = Emulated(dtype=dtype, numerics=Numerics(splits=splits))
    ratios = observed(replace(PROBLEM, dtype=dtype), kernel)
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.05} == {}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("prescales", ["q", "k", "qk"])
@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_a_prescaling_kernel_errs_no_more_than_predicted(dtype, prescales, spread):
    kernel = Emulated(dtype=dtype, numerics=Numerics(prescales=prescales))
    problem = replace(PROBLEM, dtype=dtype, sm_scale=spread * PROBLEM.scale)
    ratios = observed(problem, kernel)
    assert {name: ratio for name, ratio in ratios.items() if not 0.55 < ratio < 1.05} == {}


@pytest.mark.parametrize(
    "mask",
    [
        Mask(window_left=15, window_right=4),
        Mask(window_left=30, seqlens_q=(50,), seqlens_k=(61,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
def test_a_correct_kernel_errs_as_predicted_under_masks_and_scales(mask, spread):
    problem = replace(PROBLEM, mask=mask, sm_scale=spread * PROBLEM.scale)
    ratios = observed(problem, Emulated(dtype="bf16"))
    assert {name: ratio for name, ratio in ratios.items() if not 0.93 < ratio < 1.05} == {}


class TwoCasts(Emulated):
    """A kernel that rounds P and dS a second time, on another grid; 1 lies on both grids."""

    def cast(self, x: np.ndarray) -> np.ndarray:
        other = self.store(x * self.work(1.37)) / self.work(1.37)
        return self.store(np.where(x == 1, x, other))


def test_each_declared_rounding_adds_its_variance():
    ratios = observed(PROBLEM, TwoCasts(dtype="bf16", numerics=Numerics(ds_roundings=2)))
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}


@pytest.mark.parametrize("ds_scaled", [False, True])
def test_underflow_of_ds_is_predicted(ds_scaled):
    problem = replace(PROBLEM, dtype="fp16", dout="tiny")
    ratios = observed(problem, Emulated(dtype="fp16", numerics=Numerics(ds_scaled=ds_scaled)))
    assert {name: ratio for name, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}


def test_equal_values_feel_no_rounding_of_p_that_its_sum_shares():
    q, k, v, dout = make(PROBLEM).tensors
    shared, apart, unrounded = (
        variances(
            *(q, k, torch.ones_like(v), dout),
            mask=PROBLEM.mask, sm_scale=PROBLEM.scale, in_dtype="bf16", numerics=numerics,
        ).out
        for numerics in (Numerics(l_from="rounded"), Numerics(), Numerics(p_dtype="fp32"))
    )  # fmt: skip
    assert bool((shared < 1.001 * unrounded).all())
    assert bool((apart > 1.001 * unrounded).all())


def differences(got: Outputs, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The errors of the identities' sums, for two heads per group and no padding."""
    sum_dk, sum_dv = (torch.from_numpy(x).double().sum(2) for x in (got.dk, got.dv))
    sum_dout = inputs.dout.double().sum(2).unflatten(1, (2, 2)).sum(2)
    return {"sum_dk": sum_dk, "sum_dv": sum_dv - sum_dout}


def observed_sums(problem: Problem, seeds: int) -> dict[str, float]:
    """Observed over predicted root mean square error of the identities."""
    squares: dict[str, list[torch.Tensor]] = {}
    for seed in range(seeds):
        drawn = replace(problem, seed=seed)
        got, inputs = emulated(drawn, Emulated(dtype=drawn.dtype))
        predicted = predict(drawn, Numerics())
        for name, difference in differences(got, inputs).items():
            square = difference.square() / getattr(predicted, name)
            squares.setdefault(name, []).append(square.flatten())
    return {name: float(torch.cat(parts).mean()) ** 0.5 for name, parts in squares.items()}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_identities_are_off_as_predicted(dtype):
    ratios = observed_sums(replace(PROBLEM, dtype=dtype), seeds=40)
    assert 0.95 < ratios["sum_dk"] < 1.05
    assert 0.95 < ratios["sum_dv"] < 1.05


def test_rounding_of_a_large_lse_is_counted_in_the_sum_of_dv():
    ratios = observed_sums(replace(PROBLEM, dtype="fp32", inputs="lse_low_90"), seeds=4)
    assert ratios["sum_dv"] < 1.1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("largest", [1.0, 2.0**-20, 2.0**10])
def test_the_variance_of_a_rounding_is_what_casts_show(dtype, largest):
    c = constants(dtype, Numerics())
    x = torch.linspace(-largest, largest, 100_001, dtype=torch.float64)
    error = x.float().to(TORCH_DTYPES[dtype]).double() - x
    predicted = rounding(x, c.u_in, c.eta_in)
    assert 0.98 < float(error.square().mean() / predicted.mean()) < 1.02
    assert float(rounding(x.new_zeros(()), c.u_in, c.eta_in)) == 0.0


def test_chunks_of_rows_change_nothing():
    problem = replace(PROBLEM, mask=Mask(causal=True, seqlens_q=(40,)))
    whole, parts = (predict(problem, Numerics(), rows=rows) for rows in (64, 17))
    differ = [
        name
        for name, a, b in zip(Variances._fields, whole, parts, strict=True)
        if not bool(((a - b).abs() <= 2.0**-40 * a).all())
    ]
    assert differ == []


@pytest.mark.parametrize("dirty", ["nan", "inf", "max"])
def test_padding_changes_nothing(dirty):
    mask = Mask(causal=True, seqlens_q=(40,), seqlens_k=(33,))
    clean = replace(PROBLEM, mask=mask)
    same = [
        torch.equal(a, b)
        for a, b in zip(
            predict(clean, Numerics()),
            predict(replace(clean, dirty=dirty), Numerics()),
            strict=True,
        )
    ]
    assert all(same)


def test_exact_outputs_have_no_variance():
    mask = Mask(causal=True, seqlens_q=(64,), seqlens_k=(30,))
    predicted = predict(replace(PROBLEM, mask=mask), Numerics())
    seen = mask.dense(1, 1, 64, 80)[0, 0].numpy()
    live, used = torch.from_numpy(seen.any(1)), torch.from_numpy(seen.any(0))
    for name, touched in (("out", live), ("dq", live), ("dk", used), ("dv", used)):
        variance = getattr(predicted, name)
        assert not variance[:, :, ~touched].any(), name
        assert bool((variance[:, :, touched] > 0).all()), name
    assert np.array_equal(predicted.keys_seen[0, 0].numpy(), seen.sum(1))
    assert np.array_equal(predicted.rows_seen[0, 0].numpy(), 2 * seen.sum(0))  # two heads per group


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_an_empty_problem_has_no_variance(sizes):
    predicted = predict(replace(PROBLEM, **sizes), Numerics())
    assert predicted.dq.shape == (sizes.get("B", 1), 4, sizes.get("M", 64), 32)
    assert not any(bool(x.any()) for x in predicted)
