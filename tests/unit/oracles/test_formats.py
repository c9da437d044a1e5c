"""Formats of 8 bits: both writings of the casts agree with each other, ml_dtypes and PyTorch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fa_verify.oracles.formats import in_numpy, in_torch
from fa_verify.oracles.formats.element import FORMATS, OVERFLOWS, ROUNDINGS, format_of

FLOATS = ("e4m3fn", "e5m2")
LIMITS = {  # largest, least normal, spacing of subnormal numbers: OFP8 1.0, tables 1 and 2
    "e4m3fn": (448.0, 2.0**-6, 2.0**-9),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "int8": (127.0, 1.0, 1.0),
}


def all_bf16() -> torch.Tensor:
    """Every bf16, as float64."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).double()


def sample() -> torch.Tensor:
    """Every bf16, and 2**16 float32 of exponents around the formats' ranges."""
    rng = np.random.default_rng(7)
    wide = np.ldexp(rng.uniform(-2, 2, 2**16), rng.integers(-20, 18, 2**16)).astype(np.float32)
    return torch.cat([all_bf16(), torch.from_numpy(wide).double()])


def near_ties(name: str) -> torch.Tensor:
    """Every number, the middle of every two, and the float64 on both sides of each."""
    numbers = torch.tensor([FORMATS[name].magnitude(c) for c in range(FORMATS[name].largest_code)])
    numbers = numbers.double()
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, 61440.0])])
    either = [torch.nextafter(points, torch.full_like(points, end)) for end in (-1.0, 1e9)]
    points = torch.cat([points, *either])
    return torch.cat([points, -points])


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def same(codes: np.ndarray, other: np.ndarray, name: str) -> bool:
    """Whether codes agree, any NaN with any."""
    nan = [np.isnan(in_numpy.decoded(x, FORMATS[name])) for x in (codes, other)]
    return bool(np.all((codes == other) | (nan[0] & nan[1])))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_limits_of_their_standard(name):
    form = FORMATS[name]
    assert (form.largest, form.least_normal, form.spacing) == LIMITS[name]
    assert format_of(form.dtype) is form
    assert format_of(torch.bfloat16) is None


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_both_writings_make_the_same_codes(name, rounding, overflow):
    x = torch.cat([sample(), near_ties(name)])
    x = x if FORMATS[name].nan_code else x[~x.isnan()]
    first = bits_of(in_torch.encoded(x, FORMATS[name], rounding, overflow))
    second = in_numpy.encoded(x.numpy(), FORMATS[name], rounding, overflow)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", FORMATS)
def test_both_writings_read_every_code(name):
    form = FORMATS[name]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    first = in_torch.decoded(codes.view(form.dtype), form).numpy()
    second = in_numpy.decoded(codes.numpy(), form)
    assert np.array_equal(first, second, equal_nan=True)
    assert np.array_equal(np.signbit(first), np.signbit(second))
    assert np.array_equal(first, codes.view(form.dtype).double().numpy(), equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_code_is_what_its_number_is_encoded_as(name):
    form = FORMATS[name]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    numbers = in_torch.decoded(codes.view(form.dtype), form)
    finite = numbers.isfinite()
    for rounding in ROUNDINGS:
        again = in_torch.encoded(numbers[finite], form, rounding)
        assert torch.equal(again.view(torch.uint8), codes[finite])


@pytest.mark.parametrize("name", FLOATS)
def test_casts_to_nearest_are_those_of_ml_dtypes(name):
    kind = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
    x = torch.cat([sample(), near_ties(name)]).numpy()
    with np.errstate(all="ignore"):
        # Its casts overflow to NaN or infinity. They round float64 through float32, so that ties
        # are only those that float32 holds.
        x = x.astype(np.float32).astype(np.float64)
        want = x.astype(np.float32).astype(kind).view(np.uint8)
    assert same(in_numpy.encoded(x, FORMATS[name], "nearest", "nan"), want, name)


@pytest.mark.parametrize("name", FLOATS)
def test_casts_to_nearest_are_those_of_pytorch_inside_the_range(name):
    form = FORMATS[name]
    x = sample()
    # PyTorch 2.11 gives NaN beyond the range, and 2.13 saturates.
    x = x[x.abs() <= form.largest]
    want = bits_of(x.float().to(form.dtype))
    assert np.array_equal(bits_of(in_torch.encoded(x, form)), want)


@pytest.mark.parametrize(
    ("name", "x", "saturated", "not_saturated"),
    [
        ("e4m3fn", 464.0, 448.0, 448.0),
        ("e4m3fn", 464.1, 448.0, float("nan")),
        ("e4m3fn", float("inf"), 448.0, float("nan")),
        ("e5m2", 61439.0, 57344.0, 57344.0),
        ("e5m2", 61440.0, 57344.0, float("inf")),
        ("int8", 128.0, 127.0, 127.0),
        ("int8", -128.4, -128.0, -128.0),
        ("int8", 2.5, 2.0, 2.0),
        ("int8", -3.5, -4.0, -4.0),
    ],
)
def test_numbers_beyond_the_range_and_ties(name, x, saturated, not_saturated):
    form = FORMATS[name]
    for overflow, want in zip(OVERFLOWS, (saturated, not_saturated), strict=True):
        code = in_torch.encoded(torch.tensor([x]).double(), form, overflow=overflow)
        got = in_torch.decoded(code, form).numpy()
        assert np.array_equal(got, [want], equal_nan=True)


def test_an_integer_has_no_nan():
    x = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    for encode, given in ((in_torch.encoded, x), (in_numpy.encoded, x.numpy())):
        with pytest.raises(ValueError, match="x has NaN; int8 needs numbers"):
            encode(given, FORMATS["int8"])
