"""Merged attention states: both references and both bounds agree, and match 50 digits."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch

from fa_verify.oracles.bounds import merging
from fa_verify.oracles.bounds.in_numpy import merging as numpy_merging
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.merging import Merged, merged
from fa_verify.oracles.stream import normal, uniform
from fa_verify.properties.inputs.families import TORCH_DTYPES

EPS = torch.finfo(torch.float64).eps


def states(seed: int, dtype: str = "fp32", P: int = 4, rows: int = 3, Dv: int = 3):
    """Parts of several sizes, one row in four of a part empty, and the gradients."""
    shape = (P, 2, 1, rows, Dv)
    empty = uniform(seed, "empty", shape[:4]) < 0.25
    outs = normal(seed, "outs", shape).to(TORCH_DTYPES[dtype])
    lses = normal(seed, "lses", shape[:4]) * (1, 8, 40)[seed % 3] + (0, 6e4, -90)[seed % 3]
    lses = lses if dtype == "fp64" else lses.to(torch.float32)
    lses = lses.masked_fill(empty, -math.inf)
    outs = outs.masked_fill(empty[..., None], math.nan)
    dout = normal(seed, "dout", shape[1:]).to(TORCH_DTYPES[dtype])
    return outs, lses, dout, normal(seed, "dlse", shape[1:4]).to(lses.dtype)


def as_arrays(inputs):
    """The inputs as float64 arrays; parts that saw no key hold 0, as NumPy multiplies them."""
    outs, *rest = inputs
    outs = torch.where((rest[0] == -math.inf)[..., None], 0.0, outs)
    return tuple(x.to(torch.float64).numpy() for x in (outs, *rest))


@pytest.mark.parametrize("seed", range(9))
def test_both_references_agree(seed):
    inputs = states(seed)
    got, want = merged(*inputs), numpy_merging.merged(*as_arrays(inputs))
    # Each reference may err by half of the bound of a float64 kernel.
    allowed = merging.merge_bound(*inputs, in_dtype="fp64")
    for x, y, limit in zip(got, want, allowed, strict=True):
        y = torch.from_numpy(y)
        assert x.shape == y.shape
        assert ((x == y) | ((x - y).abs() <= limit)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("off", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_both_bounds_agree(dtype, off, flushes, seed):
    inputs = states(seed, dtype)
    beside = {"in_dtype": dtype, "numerics": Numerics(flushes=flushes)}
    offs = {}
    if off:
        offs = {
            "out_errors": off * uniform(seed, "of out", inputs[0].shape),
            "lse_errors": off * uniform(seed, "of lse", inputs[1].shape),
        }
    got = merging.merge_bound(*inputs, **beside, **offs)
    arrays = {name: x.numpy() for name, x in offs.items()}
    want = numpy_merging.merge_bound(*as_arrays(inputs), **beside, **arrays)
    for x, y in zip(got, want, strict=True):
        y = torch.from_numpy(y)
        assert x.shape == y.shape
        assert x.isfinite().all()
        # Differences of nearly equal numbers, |out_p - out| and slopes, lose digits.
        assert ((x - y).abs() <= 1e-6 * y).all()
        assert ((x == 0) == (y == 0)).all()


def exactly(outs, lses, dout, dlse) -> tuple[list, object, list, list]:
    """The merge of one row in mpmath: out, lse, douts, dlses."""
    parts = [p for p in range(len(lses)) if lses[p] != -math.inf]
    weights = {p: mpmath.exp(mpmath.mpf(float(lses[p]))) for p in parts}
    total = mpmath.fsum(weights.values())
    shares = {p: x / total for p, x in weights.items()}
    columns = range(len(dout))
    numbers = {p: [mpmath.mpf(float(x)) for x in outs[p]] for p in parts}
    out = [mpmath.fsum(shares[p] * numbers[p][d] for p in parts) for d in columns]
    dots = {p: mpmath.fsum(numbers[p][d] * float(dout[d]) for d in columns) for p in parts}
    delta = mpmath.fsum(shares[p] * dots[p] for p in parts)
    none = [mpmath.mpf(0)] * len(dout)
    douts = [
        [shares[p] * float(x) for x in dout] if p in shares else none for p in range(len(lses))
    ]
    dlses = [
        shares[p] * (dots[p] - delta + float(dlse)) if p in shares else mpmath.mpf(0)
        for p in range(len(lses))
    ]
    return out, mpmath.log(total), douts, dlses


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_is_what_fifty_digits_say(seed):
    inputs = states(seed, "fp64")
    got, limit = merged(*inputs), merging.merge_bound(*inputs, in_dtype="fp64")
    outs, lses, dout, dlse = inputs
    with mpmath.workdps(50):
        for at in itertools.product(*map(range, dlse.shape)):
            if (lses[:, *at] == -math.inf).all():
                continue
            want = exactly(outs[:, *at], lses[:, *at], dout[at], dlse[at])
            places = (at, at, (slice(None), *at), (slice(None), *at))
            for x, y, bound, place in zip(got, want, limit, places, strict=True):
                y = torch.tensor(mpmath.matrix(y).apply(float).tolist() if x.ndim > 4 else
                                 [float(z) for z in y] if isinstance(y, list) else float(y),
                                 dtype=torch.float64)  # fmt: skip
                assert ((x[place] - y).abs() <= bound[place]).all()


def test_what_saw_nothing_gives_zeros_whatever_its_gradients_hold():
    outs, lses, dout, dlse = states(0)
    lses[:, 0, 0, 1] = -math.inf
    dout[0, 0, 1], dlse[0, 0, 1] = math.nan, math.inf
    got = merged(outs, lses, dout, dlse)
    assert not got.out[0, 0, 1].any()
    assert got.lse[0, 0, 1] == -math.inf
    empty = lses == -math.inf
    assert not got.douts[empty].any()
    assert not got.dlses[empty].any()
    bound = merging.merge_bound(outs, lses, dout, dlse, in_dtype="fp32")
    assert not bound.out[0, 0, 1].any()
    assert not bound.douts[empty].any()
    assert all(x.isfinite().all() for x in bound)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_an_infinity_of_an_lse_gives_nan(value):
    outs, lses, dout, dlse = states(0)
    lses[:, 1, 0, 2] = torch.tensor([0.0, value, 1.0, -math.inf])
    got = merged(outs, lses, dout, dlse)
    assert got.out[1, 0, 2].isnan().all()
    assert got.lse[1, 0, 2].isnan()
    assert got.out[0].isfinite().all()


def test_no_part_is_a_merge_of_nothing():
    outs, lses, dout, dlse = states(0)
    for got in (merged(outs[:0], lses[:0], dout, dlse),):
        assert not got.out.any()
        assert (got.lse == -math.inf).all()
    bound = merging.merge_bound(outs[:0], lses[:0], dout, dlse, in_dtype="fp32")
    assert isinstance(bound, Merged)
    assert not bound.out.any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_float32_arithmetic_with_errors_of_the_parts_stays_within_the_bound(dtype, seed):
    outs, lses, dout, dlse = states(seed, dtype, P=7, rows=40, Dv=5)
    offs = 1e-2 * uniform(seed, "a", outs.shape), 1e-2 * uniform(seed, "b", lses.shape)
    signs = [
        uniform(seed, name, x.shape).sub(0.5).sign() for name, x in zip("cd", offs, strict=True)
    ]
    near_outs, near_lses = outs + signs[0] * offs[0], lses + signs[1] * offs[1]
    want = merged(outs, lses, dout, dlse)
    bound = merging.merge_bound(
        outs, lses, dout, dlse, in_dtype=dtype, out_errors=offs[0], lse_errors=offs[1]
    )
    got = merged(near_outs, near_lses, dout, dlse)
    for name, x, y, limit in zip(Merged._fields, got, want, bound, strict=True):
        assert ((x == y) | ((x - y).abs() <= limit)).all(), name
