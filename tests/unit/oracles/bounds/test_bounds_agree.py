"""The two references agree, and so do the two bounds; each pair is written independently."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference import numpy_reference, torch_reference

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DECLARATIONS = {
    "default": {},
    "tf32": {"dots": "tf32"},
    "tf32 truncated": {"dots": "tf32", "tf32_conversion": "truncate"},
    "tf32 to nearest": {"dots": "tf32", "tf32_conversion": "nearest", "p_dtype": "fp32"},
    "tf32 away from 0": {
        "dots": "tf32",
        "tf32_conversion": "nearest_away",
        "ds_scaled": True,
    },
    "accumulator": {"accumulator": 4.0},
    "prescaled q": {"prescales": "q"},
    "prescaled k": {"prescales": "k"},
    "prescaled qk": {"prescales": "qk"},
    "fp32 p": {"p_dtype": "fp32"},
    "ds scaled": {"ds_scaled": True},
    "ds rounded twice": {"ds_roundings": 2},
    "p normalised": {"p_normalised": True},
    "l by tile": {"l_order": "tile"},
    "l by wide tile": {"l_order": "tile", "l_tile": 48},
    "rounded l": {"l_from": "rounded"},
    "ds of rounded p": {"ds_from": "rounded"},
    "dtype group sum": {"group_sum": "dtype"},
    "rescales put off": {"rescale_threshold": 8.0},
    "split": {"splits": 3},
    "split, and flushes": {"splits": 2, "flushes": True},
    "flushes": {"flushes": True},
    "atomic": {"atomic": ("dq",)},
    "atomic dk": {"atomic": ("dk",)},
    "partial sums": {"atomic": ("dk", "dv"), "partial_sums": "input"},
    "all partial sums": {
        "atomic": ("dq", "dk", "dv"),
        "partial_sums": "input",
        "group_sum": "dtype",
        "flushes": True,
    },
    "many": {
        "dots": "tf32",
        "tf32_conversion": "truncate",
        "accumulator": 2.0,
        "prescales": "qk",
        "ds_scaled": True,
        "ds_roundings": 3,
        "l_order": "tile",
        "l_from": "rounded",
        "ds_from": "rounded",
        "group_sum": "dtype",
        "flushes": True,
    },
}
PROBLEMS = range(6)  # numbers of the problems for each dtype and declaration


def a_mask(draw: random.Random, B: int, M: int, N: int) -> Mask:
    """Any combination of causal, window and lengths; empty rows and lengths 0 stay in."""
    causal = draw.random() < 0.4
    lengths = draw.random() < 0.5
    return Mask(
        causal=causal,
        window_left=draw.choice([None, None, 0, 3, 20]),
        window_right=None if causal else draw.choice([None, None, 0, 5]),
        seqlens_q=tuple(draw.randint(0, M) for _ in range(B)) if lengths else None,
        seqlens_k=tuple(draw.randint(0, N) for _ in range(B)) if lengths else None,
    )


def a_problem(seed: str) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """Float64 inputs that hold values of a low-precision dtype, the mask and scale, block_n."""
    draw = random.Random(seed)
    dtype = DTYPES[seed.split("/")[0]]
    B, Hk, G = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3)
    M, N = draw.choice([1, 5, 16, 33, 50]), draw.choice([1, 7, 16, 40, 70])
    D, Dv = draw.choice([3, 16, 24]), draw.choice([1, 8, 20])
    mask = a_mask(draw, B, M, N)
    shapes = {"q": (B, Hk * G, M, D), "k": (B, Hk, N, D)}
    shapes |= {"v": (B, Hk, N, Dv), "dout": (B, Hk * G, M, Dv)}
    inputs = [
        stream.normal(draw.randrange(2**31), name, shape) * draw.choice([1e-3, 0.3, 1, 1, 3])
        for name, shape in shapes.items()
    ]
    low = [x.to(dtype).to(torch.float64) for x in inputs]
    rows, keys = mask.lengths(B, M, N)
    for b in range(B):
        for x, length in zip(low, (rows[b], keys[b], keys[b], rows[b]), strict=True):
            x[b, :, length:] = math.nan
    scale = draw.choice([D**-0.5, 0.11, 2.0])
    return low, {"mask": mask, "sm_scale": scale}, draw.choice([16, 16, 32, 64])


def as_arrays(inputs: list[torch.Tensor]) -> list[np.ndarray]:
    return [x.numpy() for x in inputs]


def assert_within(
    got: Outputs[torch.Tensor], want: Outputs[np.ndarray], allowed: Outputs[torch.Tensor]
) -> None:
    """Every element finite or equal, and as close as allowed; NaN fails."""
    for name, a, b, most in zip(OUTPUTS, got, want, allowed, strict=True):
        other = torch.from_numpy(b)
        close = (a == other) | ((a - other).abs() <= most)
        assert close.all(), f"{name}: {a[~close][:3]} and {other[~close][:3]}"


@pytest.mark.parametrize("declared", ["default", "flushes", "ds of rounded p"])
@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_and_bounds_agree_on_a_gradient_of_lse(
    dtype: str, case: int, declared: str
) -> None:
    inputs, call, block_n = a_problem(f"{dtype}/dlse/{case}")
    dlse = stream.normal(case, "dlse", inputs[3].shape[:3]) * (1, 64)[case % 2]
    rows = call["mask"].lengths(*inputs[0].shape[:3:2], inputs[1].shape[2])[0]
    for b, length in enumerate(rows):
        dlse[b, :, length:] = math.nan
    want = numpy_reference.attention(*as_arrays(inputs), dlse=dlse.numpy(), **call)
    got = torch_reference.attention(*inputs, dlse, **call)
    numerics = Numerics(block_n=block_n, **DECLARATIONS[declared])
    call |= {"in_dtype": dtype, "numerics": numerics}
    want_bound = numpy_check.bound(*as_arrays(inputs), dlse=dlse.numpy(), **call)
    judged = error_model.judge(*inputs, dlse, **call, rows=32)
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in want_bound))
    assert_within(judged.bound, want_bound, closely)
    without = error_model.judge(*inputs, **call, rows=32).bound
    assert (judged.bound.dq > without.dq).any() == without.dq.any()


@pytest.mark.parametrize("p_factor", [1.0, 2.0**-9])
@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bounds_agree_on_products_of_codes_and_scales(dtype: str, case: int, p_factor: float):
    (q, k, v, dout), call, block_n = a_problem(f"{dtype}/codes/{case}")
    call |= {"in_dtype": dtype, "numerics": Numerics(block_n=block_n)}
    k, v = k * 1.1, v * 0.9
    want = numpy_check.bound(
        *as_arrays([q, k, v, dout]), **call, dequantised=True, p_factor=p_factor
    )
    given = q.to(DTYPES[dtype])
    got = error_model.judge(given, k, v, dout, **call, rows=32, p_factor=p_factor).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))
    plain = error_model.judge(given.double(), k, v, dout, **call, rows=32).bound
    assert (got.out >= plain.out).all()
    assert (got.out > plain.out).any() == plain.out.any()


def test_bounds_agree_where_a_gradient_of_lse_is_flushed() -> None:
    (q, k, v, dout), call, block_n = a_problem("fp32/flushed dlse/0")
    small = [(x * 2.0**-120).to(torch.float32).double() for x in (v, dout)]
    dlse = stream.normal(0, "dlse", dout.shape[:3]) * 2.0**-125
    call |= {"in_dtype": "fp32", "numerics": Numerics(block_n=block_n, flushes=True)}
    want = numpy_check.bound(*as_arrays([q, k, *small]), dlse=dlse.numpy(), **call)
    got = error_model.judge(q, k, *small, dlse, **call, rows=32).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("small", range(4))
def test_bounds_agree_where_tf32_truncates_subnormal_operands(small: int) -> None:
    inputs, call, block_n = a_problem("fp32/subnormal/0")
    # One tensor is subnormal, and the other operand of its dots is large.
    scales = [1.0, 1.0, 2.0**30, 1.0]
    scales[small] = 2.0**-130
    if small < 2:
        scales[1 - small] = 2.0**120
    inputs = [(x * s).to(torch.float32).double() for x, s in zip(inputs, scales, strict=True)]
    numerics = Numerics(block_n=block_n, dots="tf32")
    want = numpy_check.bound(*as_arrays(inputs), **call, in_dtype="fp32", numerics=numerics)
    got = error_model.judge(*inputs, **call, in_dtype="fp32", numerics=numerics, rows=32).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("sm_scale", [0.2, 20.0])
@pytest.mark.parametrize("prescales", ["q", "k", "qk"])
def test_bounds_agree_where_a_prescaled_operand_is_flushed(prescales: str, sm_scale: float) -> None:
    inputs, call, block_n = a_problem("fp32/flushed/0")
    small = 1 if prescales == "k" else 0
    inputs[small], inputs[1 - small] = inputs[small] * 2.0**-128, inputs[1 - small] * 2.0**120
    inputs = [x.to(torch.float32).double() for x in inputs]
    numerics = Numerics(block_n=block_n, flushes=True, prescales=prescales)
    call |= {"in_dtype": "fp32", "numerics": numerics, "sm_scale": sm_scale}
    want = numpy_check.bound(*as_arrays(inputs), **call)
    got = error_model.judge(*inputs, **call, rows=32).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("ds_scaled", [False, True])
@pytest.mark.parametrize("large_v", [False, True])
@pytest.mark.parametrize("small", [(2, 3), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("case", range(4))
def test_bounds_agree_where_results_are_flushed(
    case: int, small: tuple[int, ...], large_v: bool, ds_scaled: bool, splits: int
) -> None:
    inputs, call, block_n = a_problem(f"fp32/flushed/{case}")
    for place in small:
        inputs[place] = inputs[place] * 2.0**-128
    inputs[2] = inputs[2] * (2.0**100 if large_v else 1.0)
    inputs = [x.to(torch.float32).double() for x in inputs]
    numerics = Numerics(block_n=block_n, flushes=True, ds_scaled=ds_scaled, splits=splits)
    call |= {"in_dtype": "fp32", "numerics": numerics}
    want = numpy_check.bound(*as_arrays(inputs), **call)
    got = error_model.judge(*inputs, **call, rows=32).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("levels", [(9.0, 0.0, 1.0, 2.0, 0.0, 8.0), (8.0, 0.0, 3.0, 2.0, 1.0, 9.0)])
def test_bounds_agree_where_the_worst_part_begins_and_ends_within_the_row(
    levels: tuple[float, ...],
) -> None:
    # Tiles have equal scores; the maxima rise or fall from the second tile to the last but one.
    k = torch.tensor(levels, dtype=torch.float64).repeat_interleave(16).view(1, 1, -1, 1)
    one, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), stream.normal(0, "v", k.shape)
    call = {"mask": Mask(), "sm_scale": 1.0, "in_dtype": "fp32", "numerics": Numerics(splits=2)}
    want = numpy_check.bound(*as_arrays([one, k, v, one]), **call)
    got = error_model.judge(one, k, v, one, **call).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("in_dtype", ["bf16", "fp32"])
def test_bounds_agree_where_all_weight_lies_on_values_of_zero(in_dtype: str) -> None:
    # The error of out comes only from a P that underflows in its cast and in the accumulator.
    q, k, v, dout = (
        torch.tensor(values, dtype=torch.float64).view(1, 1, -1, 1)
        for values in ([1.0], [0.0, -90.0], [0.0, 1.0], [1.0])
    )
    call = {"mask": Mask(), "sm_scale": 1.0, "in_dtype": in_dtype, "numerics": Numerics()}
    want = numpy_check.bound(*as_arrays([q, k, v, dout]), **call)
    assert want.out.item() > 2 * 2.0**-126
    got = error_model.judge(q, k, v, dout, **call).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("in_dtype", DTYPES)
def test_references_agree_to_1e_minus_12_of_their_terms(in_dtype: str, case: int) -> None:
    inputs, call, _ = a_problem(f"{in_dtype}/reference/{case}")
    want = numpy_reference.attention(*as_arrays(inputs), **call)
    got = torch_reference.attention(*inputs, **call, rows=20)
    judged = error_model.judge(*inputs, **call, in_dtype=in_dtype, numerics=Numerics())
    assert judged.max_score <= 100
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))


@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("in_dtype", DTYPES)
def test_bounds_agree_to_1e_minus_10(in_dtype: str, declared: str, case: int) -> None:
    inputs, call, block_n = a_problem(f"{in_dtype}/{declared}/{case}")
    numerics = Numerics(block_n=block_n, **DECLARATIONS[declared])
    want = numpy_check.bound(*as_arrays(inputs), **call, in_dtype=in_dtype, numerics=numerics)
    got = error_model.judge(*inputs, **call, in_dtype=in_dtype, numerics=numerics, rows=32).bound
    assert_within(got, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))
