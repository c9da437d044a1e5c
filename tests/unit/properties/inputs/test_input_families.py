import dataclasses
from itertools import groupby

import pytest
import torch
from hypothesis import given

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import DTYPES, TENSORS, Problem
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.problems.strategies import problems

LONG = Problem(B=2, H=4, Hk=2, M=61, N=67, D=64, Dv=48, mask=Mask(causal=True))


@pytest.mark.parametrize("tensor", range(3))
@pytest.mark.parametrize("seed", range(8))
def test_outliers_has_an_outlier_in_every_tensor(tensor, seed):
    single = make(Problem(D=1, Dv=1, inputs="outliers", seed=seed))[tensor]
    assert single == 30
    assert (make(dataclasses.replace(LONG, inputs="outliers", seed=seed))[tensor] == 30).any()


def test_massive_channel_is_1000_times_larger_in_k_and_smaller_in_q():
    problem = dataclasses.replace(LONG, inputs="massive_channel", seed=7)
    q, k, *_ = make(problem)
    spread_q, spread_k = (x.std((0, 1, 2)) for x in (q, k))
    others = torch.arange(problem.D) != 7
    assert 800 < spread_k[7] < 1200
    assert 1 / 1200 < spread_q[7] < 1 / 800
    assert ((spread_k[others] > 0.7) & (spread_k[others] < 1.4)).all()
    assert ((spread_q[others] > 0.7) & (spread_q[others] < 1.4)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_mean_v_is_50_plus_noise(dtype):
    v = make(dataclasses.replace(LONG, inputs="large_mean_v", dtype=dtype)).v.double()
    assert 49.9 < v.mean() < 50.1
    assert 0.9 < v.std() < 1.1


def test_positive_v_has_no_negative_value():
    v = make(dataclasses.replace(LONG, inputs="positive_v")).v
    assert (v >= 0).all()
    # The mean of |N(0, 1)| is sqrt(2 / pi) = 0.8.
    assert 0.78 < v.mean() < 0.82


def in_range(problem):
    judgement = error_model.judge(
        *make(problem),
        mask=problem.mask,
        sm_scale=problem.scale,
        in_dtype=problem.dtype,
        numerics=Numerics(),
    )
    return judgement.out_of_range is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_most_problems_near_the_largest_number_are_in_range(dtype):
    problem = dataclasses.replace(LONG, inputs="near_max", dtype=dtype, B=1, M=20, D=16, Dv=16)
    assert sum(in_range(dataclasses.replace(problem, seed=seed)) for seed in range(10)) > 5


def test_near_max_reaches_a_quarter_of_the_largest_number_in_fp16():
    v = make(dataclasses.replace(LONG, inputs="near_max", dtype="fp16")).v.double()
    assert v.abs().max() > 0.99 * 65504 / 4
    assert v.abs().min() >= 65504 // 8
    assert v.min() < 0 < v.max()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_near_max_comes_within_32_times_the_longest_sum_of_the_largest_number(dtype):
    v = make(dataclasses.replace(LONG, inputs="near_max", dtype=dtype)).v.double()
    longest = LONG.G * LONG.M
    assert v.abs().min() * longest * 32 >= 0.99 * torch.finfo(TORCH_DTYPES[dtype]).max


@pytest.mark.parametrize("inputs", ["one_hot_v", "zero_k_one_hot_v"])
@pytest.mark.parametrize("Dv", [1, 5, 48])
def test_one_hot_v_has_its_one_at_the_key_modulo_the_width(inputs, Dv):
    v = make(dataclasses.replace(LONG, inputs=inputs, Dv=Dv)).v
    want = torch.zeros(LONG.N, Dv)
    for n in range(LONG.N):
        want[n, n % Dv] = 1
    assert (v == want).all()


def test_one_hot_v_alone_leaves_the_scores_random():
    q, k, *_ = make(dataclasses.replace(LONG, inputs="one_hot_v"))
    assert 0.9 < q.std() < 1.1
    assert 0.9 < k.std() < 1.1


def test_zero_k_unit_v_has_values_of_1():
    assert (make(dataclasses.replace(LONG, inputs="zero_k_unit_v")).v == 1).all()


@pytest.mark.parametrize("tensor", range(3))
def test_constant_has_one_value_a_tensor(tensor):
    assert make(dataclasses.replace(LONG, inputs="constant"))[tensor].unique().numel() == 1


@pytest.mark.parametrize("inputs", ["zero_k", "zero_k_one_hot_v", "zero_k_unit_v"])
def test_zero_k_is_zero(inputs):
    made = make(dataclasses.replace(LONG, inputs=inputs))
    assert not made.k.any()
    assert made.q.all()


def test_most_tiny_values_lie_between_1e_6_and_1e_4_in_fp16():
    v = make(dataclasses.replace(LONG, inputs="tiny", dtype="fp16")).v.double().abs()
    assert ((v > 1e-6) & (v < 1e-4)).double().mean() > 0.5
    assert v.max() < 1e-3


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ({"inputs": "subnormal"}, "v"),
        ({"inputs": "tiny_k"}, "k"),
        ({"inputs": "tiny_q"}, "q"),
        ({"dout": "subnormal"}, "dout"),
    ],
)
def test_subnormal_values_are_subnormal(family, tensor, dtype):
    made = make(dataclasses.replace(LONG, dtype=dtype, **family))
    values = getattr(made, tensor).abs()
    assert (values < torch.finfo(values.dtype).tiny).all()
    assert (values != 0).double().mean() > 0.9
    others = [x for name, x in zip(TENSORS, made.tensors, strict=True) if name != tensor]
    assert all(x.double().std() > 0.9 for x in others)


def test_tiny_dout_is_about_1e_5():
    dout = make(dataclasses.replace(LONG, dout="tiny")).dout
    assert 5e-6 < dout.std() < 2e-5


@pytest.mark.parametrize(("family", "value"), [("zero", 0), ("constant", 1)])
def test_dout_of_one_value(family, value):
    assert (make(dataclasses.replace(LONG, dout=family)).dout == value).all()


def rows_with_gradients(dout, seed, M=90):
    """Whether each row of a head has a gradient, the same in every head."""
    rows = (make(dataclasses.replace(LONG, M=M, dout=dout, seed=seed)).dout != 0).any(3)
    assert (rows == rows[0, 0]).all()
    return rows[0, 0].tolist()


@pytest.mark.parametrize(("seed", "length"), [*enumerate((1, 3, 16, 20, 40))])
def test_a_masked_loss_has_runs_of_rows_without_gradients(seed, length):
    for start in range(0, 400, 5):
        runs = [
            (used, len([*run]))
            for used, run in groupby(rows_with_gradients("masked", start + seed))
        ]
        assert {used for used, _ in runs} == {False, True}
        assert {size for _, size in runs[1:-1]} <= {length}


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_one_row_of_each_tile_has_a_gradient(seed):
    used = rows_with_gradients("one_row_of_a_tile", seed)
    assert [m for m, there in enumerate(used) if there] == [*range(seed % 16, 90, 16)]


@given(problems(dout="one_hot", dirty="zero"))
def test_one_hot_has_a_single_one_in_a_valid_row_of_each_head(problem):
    dout = make(problem).dout.double()
    rows, _ = problem.mask.lengths(problem.B, problem.M, problem.N)
    want = torch.tensor([float(length > 0) for length in rows]).view(-1, 1)
    assert (dout.sum((2, 3)) == want).all()
    assert (dout * (dout - 1) == 0).all()
