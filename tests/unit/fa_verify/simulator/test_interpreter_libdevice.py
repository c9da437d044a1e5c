"""Interpreted kernels call libdevice, with the results of a GPU up to its error."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU has its own libdevice", allow_module_level=True)

# Imported by their names before the repair, as in a process whose kernels ``verify`` takes over.
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.cuda.libdevice import fast_expf  # noqa: E402
from triton.language.extra.libdevice import tanh  # noqa: E402

from fa_verify.simulator.interpreter import repair as repaired  # noqa: E402

repaired.repair()

FP32, FP64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan


@triton.jit
def call_kernel(X, Y, Z, NAME: tl.constexpr, ARGS: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(X + offs)
    y = tl.load(Y + offs)
    if ARGS == 1:
        tl.store(Z + offs, getattr(libdevice, NAME)(x))
    elif ARGS == 2:
        tl.store(Z + offs, getattr(libdevice, NAME)(x, y))
    else:
        tl.store(Z + offs, getattr(libdevice, NAME)(x, y, y))


@triton.jit
def names_kernel(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(X + offs)
    tl.store(Y + offs, libdevice.tanh(x))
    tl.store(Y + N + offs, tanh(x))
    tl.store(Y + 2 * N + offs, tl.extra.libdevice.tanh(x))
    tl.store(Y + 3 * N + offs, tl.extra.cuda.libdevice.tanh(x))
    tl.store(Y + 4 * N + offs, fast_expf(x))


@triton.jit
def wait_kernel(X):
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(X, 1.0)


def called(name, x, y=None, *, args=1, result=None):
    """The function of float32 or float64 numbers, padded to a power of two."""
    size = 1 << (len(x) - 1).bit_length()
    given = [torch.cat([z, z[:1].expand(size - len(z))]) for z in (x, x if y is None else y)]
    out = torch.empty(size, dtype=result or x.dtype)
    call_kernel[(1,)](*given, out, NAME=name, ARGS=args, N=size)
    return out[: len(x)]


def units(got, want):
    """The errors in units of the last place of the exact values."""
    digits, least = {FP32: (24, -149), FP64: (53, -1074)}[got.dtype]
    errors = []
    with mpmath.workdps(60):
        for g, w in zip(got.tolist(), want, strict=True):
            last = max(math.floor(mpmath.log(abs(w), 2)) + 1 - digits, least)
            errors.append(float(abs(mpmath.mpf(g) - w) / mpmath.mpf(2) ** last))
    return errors


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("tanh", mpmath.tanh), ("exp", mpmath.exp), ("exp2", lambda x: 2**x),
        ("exp10", lambda x: 10**x), ("expm1", mpmath.expm1), ("log", mpmath.log),
        ("log2", lambda x: mpmath.log(x, 2)), ("log10", mpmath.log10), ("log1p", mpmath.log1p),
        ("sqrt", mpmath.sqrt), ("rsqrt", lambda x: 1 / mpmath.sqrt(x)), ("cbrt", mpmath.cbrt),
        ("rcbrt", lambda x: 1 / mpmath.cbrt(x)), ("sinh", mpmath.sinh), ("cosh", mpmath.cosh),
        ("asinh", mpmath.asinh), ("atan", mpmath.atan), ("erf", mpmath.erf),
        ("erfc", mpmath.erfc), ("normcdf", mpmath.ncdf), ("sin", mpmath.sin),
        ("cos", mpmath.cos), ("tan", mpmath.tan), ("tgamma", mpmath.gamma),
        ("sinpi", mpmath.sinpi), ("cospi", mpmath.cospi),
    ],
)  # fmt: skip
def test_functions_round_the_exact_value(name, exact, dtype):
    x = torch.tensor([1e-3, 0.1, 0.3, 0.7, 1.3, 2.6, 3.7, 9.2], dtype=dtype)
    with mpmath.workdps(60):
        want = [exact(mpmath.mpf(each)) for each in x.tolist()]
    most = 0.501 if dtype == FP32 else 8
    assert max(units(called(name, x), want)) <= most


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("tanh", [INF, -INF, 200.0, -0.0], [1, -1, 1, -0.0]),
        ("exp", [-INF, 1e4, NAN], [0, INF, NAN]),
        ("log", [0.0, -1.0, INF], [-INF, NAN, INF]),
        ("log1p", [-1.0, -2.0], [-INF, NAN]),
        ("rsqrt", [0.0, -1.0, INF], [INF, NAN, 0]),
        ("round", [0.5, -0.5, 2.5, 0.49, -0.0], [1, -1, 3, 0, -0.0]),
        ("rint", [0.5, 1.5, -2.5], [0, 2, -2]),
        ("trunc", [1.9, -1.9], [1, -1]),
        ("sinpi", [1.0, 0.5, 1e8, INF], [0, 1, 0, NAN]),
        ("cospi", [0.5, 1.0, 1.5, INF], [0, -1, 0, NAN]),
        ("tgamma", [5.0, -1.0, 0.0, 1e3], [24, NAN, INF, INF]),
        ("abs", [-2.0, -INF], [2, INF]),
    ],
)  # fmt: skip
def test_functions_have_the_values_of_a_gpu_at_edges(name, x, want, dtype):
    got = called(name, torch.tensor(x, dtype=dtype))
    want = torch.tensor(want, dtype=dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | want.isnan(), want.signbit() | want.isnan())


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize(
    ("name", "args", "want"),
    [
        ("pow", 2, [8.0, INF, 1.0]), ("fmod", 2, [2.0, 0.5, 1.0]),
        ("remainder", 2, [-1.0, 0.5, 1.0]), ("copysign", 2, [2.0, -0.5, 1.0]),
        ("atan2", 2, [math.atan2(2, 3), math.atan2(0.5, -math.inf), math.pi / 2]),
        ("fdim", 2, [0.0, INF, 1.0]), ("fma", 3, [9.0, -INF, 0.0]),
        ("div_rn", 2, [2 / 3, -0.0, INF]),
        ("hypot", 2, [math.hypot(2, 3), INF, 1.0]), ("norm3d", 3, [math.sqrt(22), INF, 1.0]),
    ],
)  # fmt: skip
def test_functions_of_two_and_three_arguments(name, args, want, dtype):
    x, y = (torch.tensor(z, dtype=dtype) for z in ([2.0, 0.5, 1.0], [3.0, -INF, 0.0]))
    if name == "fmod":
        x = torch.tensor([2.0, 0.5, 1.0], dtype=dtype)
        y = torch.tensor([3.0, -INF, 2.0], dtype=dtype)
    if name == "remainder":
        y = torch.tensor([3.0, -INF, 2.5], dtype=dtype)
    got = called(name, x, y, args=args)
    torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), rtol=1e-15, atol=0)


def test_a_fused_product_and_sum_round_once():
    x = torch.tensor([1 + 2.0**-23], dtype=FP32)
    got = called("fma", x, -x, args=3)
    # x (-x) + (-x), whose exact value has 47 bits.
    exact = -(x.double() * x.double() + x.double())
    assert torch.equal(got, exact.float())


@pytest.mark.parametrize(
    ("name", "x", "want", "dtype"),
    [
        ("isnan", [NAN, INF, 1.0], [1, 0, 0], torch.int32),
        ("isinf", [NAN, -INF, 1.0], [0, 1, 0], torch.int32),
        ("finitef", [NAN, -INF, 1.0], [0, 0, 1], torch.int32),
        ("float2int_rz", [2.9, -2.9, 1e20, -INF, NAN], [2, -2, 2**31 - 1, -(2**31), 0],
         torch.int32),
        ("float2int_rn", [2.5, 3.5], [2, 4], torch.int32),
        ("float2uint_ru", [2.1, -7.0], [3, 0], torch.int64),
        ("float2ll_rd", [-2.1, 1e30], [-3, 2**63 - 1], torch.int64),
        ("llrint", [2.5, -3.5], [2, -4], torch.int64),
        ("float_as_int", [1.0], [0x3F800000], torch.int32),
    ],
)  # fmt: skip
def test_tests_and_conversions_of_floats(name, x, want, dtype):
    assert called(name, torch.tensor(x, dtype=FP32), result=dtype).tolist() == want


def test_fast_functions_have_the_errors_of_a_gpu():
    x = torch.tensor([30.1, -55.7, 0.1], dtype=FP32)
    got = called("fast_expf", x)
    # Rounding x log2(e) to float32 moves the exponent of two by up to half a unit.
    expected = torch.exp2((x * torch.tensor(math.log2(math.e), dtype=FP32)).double()).float()
    assert torch.equal(got, expected)
    assert not torch.equal(got, x.exp())
    large = torch.full((1,), 2.0**127, dtype=FP32)
    assert called("fast_dividef", large, large, args=2).item() == 0.0


def test_every_way_to_name_a_function_works():
    x = torch.linspace(-3, 3, 16)
    y = torch.zeros(5, 16)
    names_kernel[(1,)](x, y, N=16)
    want = x.double().tanh().float()
    assert all(torch.equal(row, want) for row in y[:4])
    torch.testing.assert_close(y[4], x.exp(), rtol=1e-6, atol=0)


def test_a_type_that_libdevice_does_not_take_is_the_kernels_fault():
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"fp16|float16"):
        called("tanh", torch.zeros(1, dtype=torch.float16))


def test_a_function_that_is_not_there_cannot_run_on_a_cpu():
    message = "^cannot run on a CPU: the interpreter has no __nv_fadd_rz of libdevice$"
    with pytest.raises(NotImplementedError, match=message):
        called("add_rz", torch.zeros(1), args=2)


def test_waits_for_the_launch_before_do_nothing():
    x = torch.zeros(1)
    wait_kernel[(1,)](x)
    assert x.item() == 1
