"""Interpreted kernels cast to e4m3 and e5m2 as GPUs do: to nearest even, and to the largest."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest
import torch

from fa_verify.simulator.interpreter import repair as repaired
from fa_verify.simulator.interpreter.eight_bit_floats import saturated

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "the Triton interpreter is not in use: kernels run on the GPU", allow_module_level=True
    )
repaired.repair()

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PEERS = {E4M3: (ml_dtypes.float8_e4m3fn, 448.0), E5M2: (ml_dtypes.float8_e5m2, 57344.0)}
BOTH = pytest.mark.parametrize("dtype", PEERS, ids=str)


@triton.jit
def cast_kernel(X, Y, N, BLOCK: tl.constexpr, ROUNDING: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offs, mask=offs < N)
    tl.store(Y + offs, x.to(Y.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=offs < N)


@triton.jit
def store_kernel(X, Y, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A store casts to the type of the pointer.
    tl.store(Y + offs, tl.load(X + offs, mask=offs < N), mask=offs < N)


@triton.jit
def dot_kernel(A, B, C, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None] * N, tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(A + rows + columns), tl.load(B + rows + columns))
    tl.store(C + rows + columns, product)


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(-(-len(x) // 4096),)](x, y, len(x), 4096, rounding)
    return y


def numbers() -> dict[str, torch.Tensor]:
    """Every bf16 and every fp16, and fp32 of exponents around the formats' ranges."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    rng = np.random.default_rng(3)
    wide = np.ldexp(rng.uniform(-2, 2, 2**16), rng.integers(-20, 18, 2**16)).astype(np.float32)
    return {
        "bf16": bits.view(torch.bfloat16), "fp16": bits.view(torch.float16),
        "fp32": torch.from_numpy(wide),
    }  # fmt: skip


def wanted(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """The codes of ml_dtypes' cast, after a clamp to the range."""
    kind, largest = PEERS[dtype]
    with np.errstate(all="ignore"):
        return np.clip(x.float().numpy(), -largest, largest).astype(kind).view(np.uint8)


def assert_same(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
    codes = got.view(torch.uint8).numpy()
    nan = [np.isnan(x.view(PEERS[dtype][0]).astype(np.float32)) for x in (codes, want)]
    assert np.all((codes == want) | (nan[0] & nan[1]))


@BOTH
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
def test_casts_round_to_nearest_even_and_saturate(source, dtype):
    x = numbers()[source]
    assert_same(cast(x, dtype), wanted(x, dtype), dtype)


@BOTH
def test_a_store_casts_as_a_cast_does(dtype):
    x = numbers()["bf16"]
    y = torch.empty(x.shape, dtype=dtype)
    store_kernel[(16,)](x, y, len(x), 4096)
    assert_same(y, wanted(x, dtype), dtype)


@BOTH
def test_casts_toward_zero_never_grow(dtype):
    x = numbers()["fp32"]
    got = cast(x, dtype, "rtz").float()
    beside = wanted(x, dtype).view(PEERS[dtype][0]).astype(np.float32)
    assert torch.all(got.abs() <= x.abs())
    # The nearest is the truncated number, or its neighbour further from 0.
    assert np.all(np.abs(beside) >= got.abs().numpy())
    assert torch.any(got != torch.from_numpy(beside))


@BOTH
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_code_is_read_exactly(target, dtype):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    assert torch.equal(cast(codes, target).nan_to_num(7.0), codes.to(target).nan_to_num(7.0))


@BOTH
def test_dots_multiply_the_numbers_of_codes(dtype):
    a, b = (torch.randn(16, 16, generator=torch.manual_seed(s)).to(dtype) for s in (1, 2))
    c = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, 16)
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_600_is_448_and_not_288():
    assert saturated(np.array([600.0, np.inf, -464.0, 25.0]), "fp8e4nv").tolist() == [
        0x7E, 0x7E, 0xFE, 0x5C,
    ]  # fmt: skip
