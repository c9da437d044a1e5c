"""The NumPy bound: its shape, declarations that widen it, and emulated kernels on both sides."""

from __future__ import annotations

import numpy as np
import pytest

from fa_verify.oracles.bounds.in_numpy.bound import bound
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference.numpy_reference import attention
from tests.unit.oracles.bounds.emulated_kernel import CASTS, FAMILIES, Case, Emulated, draw, grouped


def bound_of(case: Case, numerics: Numerics | None = None) -> Outputs:
    return bound(
        *case.arrays,
        mask=case.mask,
        sm_scale=case.sm_scale,
        in_dtype=case.dtype,
        numerics=numerics or Numerics(),
        dlse=case.dlse,
    )


def worst_shares(
    kernel: Emulated, case: Case, declared: Numerics | None = None
) -> dict[str, float]:
    """The largest error of each output as a share of the bound; equal infinities do not count."""
    got = kernel(case)
    want = attention(*case.arrays, mask=case.mask, sm_scale=case.sm_scale, dlse=case.dlse)
    allowed = bound_of(case, kernel.numerics if declared is None else declared)
    shares = {}
    for name in OUTPUTS:
        x, y, limit = (getattr(z, name) for z in (got, want, allowed))
        assert np.isfinite(limit).all(), name
        equal = x == y
        error = np.abs(np.where(equal, 0, x) - np.where(equal, 0, y))
        assert not np.isnan(error).any(), name
        share = np.where(error == 0, 0, error / np.where(limit > 0, limit, 1))
        share = np.where((error > 0) & (limit == 0), np.inf, share)
        shares[name] = float(share.max(initial=0.0))
    return shares


TF32 = Numerics(dots="tf32")
RUNGS: dict[str, tuple[str, Numerics]] = {
    "fp16": ("fp16", Numerics()),
    "bf16": ("bf16", Numerics()),
    "fp32": ("fp32", Numerics()),
    "fp64": ("fp64", Numerics()),
    "tf32": ("fp32", TF32),
    "tf32 truncated": ("fp32", Numerics(dots="tf32", tf32_conversion="truncate")),
    "tf32 to nearest": ("fp32", Numerics(dots="tf32", tf32_conversion="nearest")),
    "tf32 away from 0": ("fp32", Numerics(dots="tf32", tf32_conversion="nearest_away")),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rung", RUNGS)
def test_an_emulated_kernel_stays_within_the_bound(rung: str, family: str) -> None:
    dtype, numerics = RUNGS[rung]
    for seed in range(4):
        kernel = Emulated(dtype=dtype, numerics=numerics, reverse=seed % 2 == 1)
        shares = worst_shares(kernel, draw(seed, dtype, family))
        assert max(shares.values()) <= 1, (seed, shares)


DECLARATIONS: dict[str, Numerics] = {
    "block_n": Numerics(block_n=32),
    "prescales q": Numerics(prescales="q"),
    "prescales k": Numerics(prescales="k"),
    "prescales qk": Numerics(prescales="qk"),
    "p_dtype": Numerics(p_dtype="fp32"),
    "ds_scaled": Numerics(ds_scaled=True),
    "p_normalised": Numerics(p_normalised=True),
    "l_from": Numerics(l_from="rounded"),
    "ds_from": Numerics(ds_from="rounded"),
    "group_sum": Numerics(group_sum="dtype"),
    "flushes": Numerics(flushes=True),
    "atomic": Numerics(atomic=("dq",)),
    "rescale_threshold": Numerics(rescale_threshold=8),
    "rescale_threshold, splits": Numerics(rescale_threshold=15, splits=3),
    "splits": Numerics(splits=3),
    "more splits than tiles": Numerics(splits=9, flushes=True),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_an_emulated_kernel_stays_within_the_bound_of_what_it_declares(
    declaration: str, dtype: str
) -> None:
    kernel = Emulated(dtype=dtype, numerics=DECLARATIONS[declaration])
    for seed, family in enumerate(("normal", "scores times 8", "tiny values", "low lse")):
        shares = worst_shares(kernel, draw(10 + seed, dtype, family))
        assert max(shares.values()) <= 1, (family, shares)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_kernel_that_sums_by_atomics_needs_to_declare_it(dtype: str) -> None:
    """Each key tile adds about the smallest normal number to dq."""
    kernel = Emulated(dtype=dtype, numerics=Numerics(atomic=("dq",)))
    undeclared: set[str] = set()
    for seed in range(8):
        case = draw(seed, dtype, "normal")
        q, k, v, dout = case.arrays
        arrays = tuple(CASTS[dtype](x).astype(np.float64) for x in (q, 2.0**-126 * k, v, dout))
        case = case._replace(arrays=arrays, sm_scale=4.0)
        shares = worst_shares(kernel, case)
        assert max(shares.values()) <= 1, (seed, shares)
        plain = worst_shares(kernel, case, Numerics())
        undeclared |= {name for name, share in plain.items() if share > 1}
    assert undeclared == {"dq"}


@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_kernel_that_flushes_needs_to_declare_it(dtype: str, splits: int) -> None:
    """Values near the smallest normal number lose digits in each rescale and product of delta.

    With a large v the products are normal numbers, but dout is flushed to 0.
    """
    unflushed = Numerics(splits=splits)
    numerics = Numerics(splits=splits, flushes=True)
    undeclared: set[str] = set()
    for seed in range(8):
        case = draw(seed, dtype, "scores times 8")
        q, k, v, dout = case.arrays
        # A nonzero mean of v makes delta a sum of numbers that are flushed one by one.
        small = [CASTS[dtype](x).astype(np.float64) for x in (2.0**-126 * v, 2.0**-130 * dout)]
        for arrays in (
            (q, k, small[0], dout),
            (q, k, v + 8, small[1]),
            (q, k, 2.0**100 * v, small[1]),
        ):
            arrays = tuple(CASTS[dtype](x).astype(np.float64) for x in arrays)
            shares = worst_shares(
                Emulated(dtype=dtype, numerics=numerics), case._replace(arrays=arrays)
            )
            assert max(shares.values()) <= 1, (seed, shares)
            plain = worst_shares(
                Emulated(dtype=dtype, numerics=numerics), case._replace(arrays=arrays), unflushed
            )
            undeclared |= {name for name, share in plain.items() if share > 1}
    assert undeclared == {"out", "dq", "dk"}, undeclared


def test_truncating_both_operands_of_a_tf32_dot_stays_within_the_bound() -> None:
    below = 1 + 2.0**-10 - 2.0**-23  # truncates to the TF32 number 1
    q, k = np.zeros((1, 1, 2, 16)), np.zeros((1, 1, 2, 16))
    q[..., 0], k[:, :, 1, 0] = 1.0, -1.384  # P of the second key loses nearly 2**-10 as well
    values = np.full((1, 1, 2, 16), below)
    arrays = (CASTS["fp32"](q) * 1.0, CASTS["fp32"](k).astype(np.float64), values, values)
    shares = worst_shares(Emulated(dtype="fp32", numerics=TF32), Case(arrays, Mask(), 0.5, "fp32"))
    assert max(shares.values()) <= 1, shares


def with_a_tiny_operand(tiny: str, sm_scale: float) -> Case:
    """A case with tiny fp16 q or k, whose rounding errors add up in dk or dq."""
    rng = np.random.default_rng(0)
    small = np.tile(6e-7 * (1 + rng.random(16)), (1, 1, 48, 1))
    other = np.tile(rng.standard_normal(16), (1, 1, 48, 1))
    # dS has one sign along a column and both along a row; a tiny k has the sign of dS.
    sign = np.where(np.arange(48) % 2, 1.0, -1.0)[:, None]
    v = 10 * sign * rng.random(16) + np.zeros((1, 1, 48, 16))
    dout = np.tile(10 * rng.random(16), (1, 1, 48, 1))
    inputs = (small, other, v, dout) if tiny == "q" else (other, sign * small, v, dout)
    arrays = tuple(CASTS["fp16"](x).astype(np.float64) for x in inputs)
    return Case(arrays, Mask(), sm_scale, "fp16")


@pytest.mark.parametrize(
    ("prescales", "tiny", "sm_scale"),
    [
        ("q", "q", 0.25),
        ("k", "k", 0.25),
        ("qk", "q", 0.25),
        ("qk", "k", 0.25),
        ("qk", "q", 16.0),
        ("qk", "k", 16.0),
    ],
)
def test_a_prescaled_operand_that_underflows_stays_within_the_bound(
    prescales: str, tiny: str, sm_scale: float
) -> None:
    kernel = Emulated(dtype="fp16", numerics=Numerics(prescales=prescales))
    shares = worst_shares(kernel, with_a_tiny_operand(tiny, sm_scale))
    assert max(shares.values()) <= 1, shares


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("prescales", "tiny"), [("q", 0), ("k", 1), ("qk", 0), ("qk", 1)])
def test_a_prescaled_operand_that_counts_as_zero_stays_within_the_bound(
    prescales: str, tiny: int, dtype: str
) -> None:
    case = draw(0, dtype, mask=Mask())
    operands, (v, dout) = list(case.arrays[:2]), case.arrays[2:]
    # All values are just below the smallest normal number; times the scale they are above it.
    operands[tiny] = np.full_like(operands[tiny], 0.9 * 2.0**-126)
    operands[1 - tiny] = 2.0**122 * np.abs(operands[1 - tiny])
    arrays = (*operands, v, 2.0**-10 * dout)
    arrays = tuple(CASTS[dtype](x).astype(np.float64) for x in arrays)
    numerics = Numerics(prescales=prescales, flushes=True)
    case = case._replace(arrays=arrays, sm_scale=16.0)
    shares = worst_shares(Emulated(dtype=dtype, numerics=numerics), case)
    assert max(shares.values()) <= 1, shares
    undeclared = worst_shares(
        Emulated(dtype=dtype, numerics=numerics), case, Numerics(prescales=prescales)
    )
    assert max(undeclared.values()) > 1


FAULTS = {
    "accumulator not rescaled": {"out", "lse"},
    "delta left out": {"dq", "dk"},
    "dq scaled twice": {"dq"},
    "one key too few": {"out", "lse", "dq", "dk", "dv"},
    "last head of a group overwrites": {"dk", "dv"},
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_leaves_the_bound(fault: str, dtype: str) -> None:
    shares = worst_shares(Emulated(dtype=dtype, fault=fault), grouped(0, dtype))
    assert {name for name in FAULTS[fault] if shares[name] > 1} == FAULTS[fault], shares


def test_rounding_p_and_ds_to_bf16_leaves_the_fp16_bound() -> None:
    shares = worst_shares(Emulated(dtype="fp16", fault="coarse P and dS"), grouped(0, "fp16"))
    assert min(shares[name] for name in ("out", "dk", "dv")) > 1, shares


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_an_emulated_kernel_stays_within_the_bound_with_a_gradient_of_lse(dtype: str) -> None:
    dlse = CASTS["fp32"](np.random.default_rng(8).standard_normal((1, 2, 48)) * 10)
    shares = worst_shares(Emulated(dtype=dtype), grouped(8, dtype)._replace(dlse=dlse * 1.0))
    assert max(shares.values()) <= 1, shares


def test_ignoring_the_gradient_of_lse_leaves_the_bound() -> None:
    case = grouped(8, "bf16")._replace(dlse=np.ones((1, 2, 48)))
    shares = worst_shares(Emulated(dtype="bf16", fault="dlse ignored"), case)
    assert min(shares["dq"], shares["dk"]) > 1, shares


# Declarations: dtype, narrower, wider, and the outputs whose bound must widen everywhere.
WIDER: dict[str, tuple[str, Numerics, Numerics, set[str]]] = {
    "dots": ("fp32", Numerics(), TF32, set(OUTPUTS)),
    "tf32_conversion": (
        "fp32",
        Numerics(dots="tf32", tf32_conversion="nearest"),
        TF32,
        set(OUTPUTS),
    ),
    "accumulator": ("fp16", Numerics(), Numerics(accumulator=4), set(OUTPUTS)),
    "prescales q": ("fp16", Numerics(), Numerics(prescales="q"), set(OUTPUTS)),
    "prescales k": ("fp16", Numerics(), Numerics(prescales="k"), set(OUTPUTS)),
    "prescales qk over q": ("fp16", Numerics(prescales="q"), Numerics(prescales="qk"), {"lse"}),
    "p_dtype": ("fp16", Numerics(p_dtype="fp32"), Numerics(), set(OUTPUTS) - {"lse"}),
    "ds_scaled": ("fp16", Numerics(), Numerics(ds_scaled=True), {"dq", "dk"}),
    "ds_roundings": ("bf16", Numerics(), Numerics(ds_roundings=2), set(OUTPUTS) - {"lse"}),
    "p_normalised": ("fp16", Numerics(), Numerics(p_normalised=True), {"out"}),
    "l_order": ("fp32", Numerics(l_order="tile"), Numerics(), {"out", "lse"}),
    "l_tile": (
        "fp32",
        Numerics(l_order="tile"),
        Numerics(l_order="tile", l_tile=32),
        {"out", "lse"},
    ),
    "l_from": ("fp16", Numerics(), Numerics(l_from="rounded"), {"out", "lse"}),
    "ds_from": ("fp16", Numerics(), Numerics(ds_from="rounded"), {"dq", "dk"}),
    "group_sum": ("fp16", Numerics(), Numerics(group_sum="dtype"), {"dk", "dv"}),
    "flushes": ("fp32", Numerics(), Numerics(flushes=True), set()),
    "splits": ("fp32", Numerics(), Numerics(splits=2), set()),
    "rescale_threshold": ("fp32", Numerics(), Numerics(rescale_threshold=8), set(OUTPUTS)),
    "atomic": ("fp32", Numerics(), Numerics(atomic=("dq",)), set()),
}


@pytest.mark.parametrize("declaration", WIDER)
def test_a_declaration_never_narrows_the_bound(declaration: str) -> None:
    dtype, narrow, wide, _ = WIDER[declaration]
    case = grouped(1, dtype, Mask(causal=True, window_left=30))
    for name, low, high in zip(OUTPUTS, bound_of(case, narrow), bound_of(case, wide), strict=True):
        assert (high >= low).all(), name


@pytest.mark.parametrize("declaration", WIDER)
def test_a_declaration_widens_the_outputs_it_concerns(declaration: str) -> None:
    dtype, narrow, wide, widened = WIDER[declaration]
    case = grouped(1, dtype, Mask(seqlens_q=(40,), seqlens_k=(45,)))
    low, high = bound_of(case, narrow), bound_of(case, wide)
    for name in widened:
        x, y = getattr(low, name), getattr(high, name)
        assert ((y > x) | (x == 0)).all(), name


def test_the_bound_of_fp64_ignores_a_declared_fp32_p() -> None:
    case = grouped(1, "fp64")
    for name, x, y in zip(
        OUTPUTS, bound_of(case), bound_of(case, Numerics(p_dtype="fp32")), strict=True
    ):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_a_gradient_of_lse_never_narrows_the_bound() -> None:
    case = grouped(2, "fp32")
    with_zero = bound_of(case._replace(dlse=np.zeros((1, 2, 48))))
    for name, low, high in zip(OUTPUTS, bound_of(case), with_zero, strict=True):
        assert (high >= low).all(), name
    assert (with_zero.dq > bound_of(case).dq).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_is_finite(family: str) -> None:
    for seed in range(3):
        for name, limit in zip(OUTPUTS, bound_of(draw(seed, "fp16", family)), strict=True):
            assert np.isfinite(limit).all(), (seed, name)


def test_the_bound_is_zero_on_rows_without_a_visible_key() -> None:
    case = grouped(3, "bf16", Mask(causal=True, seqlens_q=(40,), seqlens_k=(30,)))
    limits = bound_of(case)
    for rows in (slice(0, 10), slice(40, 48)):
        assert not limits.out[:, :, rows].any()
        assert not limits.lse[:, :, rows].any()
        assert not limits.dq[:, :, rows].any()


def test_the_bound_is_positive_on_rows_with_a_visible_key() -> None:
    limits = bound_of(grouped(3, "bf16", Mask(causal=True, seqlens_q=(40,), seqlens_k=(30,))))
    assert (limits.out[:, :, 10:40] > 0).all()
    assert (limits.lse[:, :, 10:40] > 0).all()
    assert (limits.dq[:, :, 10:40] > 0).all()


def test_the_bound_is_zero_on_keys_that_no_row_sees() -> None:
    mask = Mask(causal=True, window_left=3, seqlens_q=(10,), seqlens_k=(30,))
    limits = bound_of(grouped(3, "bf16", mask), Numerics(group_sum="dtype"))
    for keys in (slice(0, 17), slice(30, 48)):
        assert not limits.dk[:, :, keys].any()
        assert not limits.dv[:, :, keys].any()
    assert (limits.dv[:, :, 17:30] > 0).all()


@pytest.mark.parametrize("dirt", [np.nan, np.inf])
def test_padding_changes_no_bit_of_the_bound(dirt: float) -> None:
    case = grouped(4, "fp16", Mask(causal=True, seqlens_q=(20,), seqlens_k=(33,)))
    dirty = tuple(x.copy() for x in case.arrays)
    for x, length in zip(dirty, (20, 33, 33, 20), strict=True):
        x[:, :, length:] = dirt
    prescaled = Numerics(prescales="qk")
    clean, got = bound_of(case, prescaled), bound_of(case._replace(arrays=dirty), prescaled)
    for name in OUTPUTS:
        np.testing.assert_array_equal(getattr(got, name), getattr(clean, name), err_msg=name)


def test_empty_sequences_have_a_bound_of_their_shape() -> None:
    for M, N in ((0, 3), (3, 0), (0, 0)):
        shapes = ((2, 2, M, 4), (2, 1, N, 4), (2, 1, N, 5), (2, 2, M, 5))
        limits = bound_of(Case(tuple(np.zeros(x) for x in shapes), Mask(), 0.5, "fp16"))
        expected = [(2, 2, M, 5), (2, 2, M), (2, 2, M, 4), (2, 1, N, 4), (2, 1, N, 5)]
        assert [x.shape for x in limits] == expected


def test_an_unknown_dtype_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="in_dtype is 'fp8'"):
        bound_of(grouped(0, "fp32")._replace(dtype="fp8"))
