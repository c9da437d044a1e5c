"""The NumPy reference against 50-digit arithmetic, brute-force masks and gradient identities."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import mpmath
import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds.in_numpy.bound import bound
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference import torch_reference
from fa_verify.oracles.reference.numpy_reference import attention, seen_keys

DIGITS = 50
# Gradients are central differences of the loss at 50 digits. Their own error (the squared step and
# the remaining digits) is below the smallest float64.
DIFFERENCE_DIGITS = 520
STEP_EXPONENT = -180

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def draw(
    seed: int, *, B: int = 1, H: int = 2, Hk: int = 1, M: int, N: int, D: int = 3, Dv: int = 2
) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = ((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M, Dv))
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, dout


def fp64_bound(arrays: Arrays, mask: Mask, sm_scale: float, dlse: np.ndarray | None = None):
    return bound(
        *arrays, mask=mask, sm_scale=sm_scale, in_dtype="fp64", numerics=Numerics(), dlse=dlse
    )


def mp_forward(q, k, v, mask: Mask, sm_scale: float) -> dict[str, np.ndarray]:
    """out and lse by the definition, scalar by scalar, on object arrays of mpf."""
    (B, H, M, _), (_, Hk, N, _), Dv = q.shape, k.shape, v.shape[-1]
    out = np.full((B, H, M, Dv), mpmath.mpf(0), dtype=object)
    lse = np.full((B, H, M), mpmath.mpf("-inf"), dtype=object)
    for b, h, m in itertools.product(range(B), range(H), range(M)):
        g = h * Hk // H
        keys = [n for n in range(N) if mask.is_visible(b, h, m, n, M=M, N=N)]
        if not keys:
            continue
        scores = [mpmath.mpf(sm_scale) * mpmath.fdot(q[b, h, m], k[b, g, n]) for n in keys]
        weights = [mpmath.exp(score) for score in scores]
        total = mpmath.fsum(weights)
        lse[b, h, m] = mpmath.log(total)
        for e in range(Dv):
            out[b, h, m, e] = mpmath.fdot(weights, [v[b, g, n, e] for n in keys]) / total
    return {"out": out, "lse": lse}


def mp_gradients(arrays: Arrays, dlse: np.ndarray, mask: Mask, sm_scale: float):
    """dq, dk, dv of sum(out * dout) and of sum(lse * dlse), by differences of their definitions."""
    to_mp = np.vectorize(mpmath.mpf, otypes=[object])
    q, k, v, dout = (to_mp(x) for x in arrays)

    def losses() -> np.ndarray:
        forward = mp_forward(q, k, v, mask, sm_scale)
        live = forward["lse"] != mpmath.mpf("-inf")
        of_out = (forward["out"] * dout)[live].sum()
        return np.array([of_out, (forward["lse"] * dlse)[live].sum()], dtype=object)

    step = mpmath.mpf(10) ** STEP_EXPONENT
    gradients = {}
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        gradients[name] = np.empty((2, *x.shape), dtype=object)
        for index in np.ndindex(x.shape):
            centre = x[index]
            x[index] = centre + step
            above = losses()
            x[index] = centre - step
            gradients[name][:, *index] = (above - losses()) / (2 * step)
            x[index] = centre
    return gradients


CASES: dict[str, tuple[Mask, dict[str, int], float]] = {
    "full": (Mask(), {"M": 3, "N": 4}, 1.0),
    "grouped heads": (Mask(), {"H": 4, "Hk": 2, "M": 2, "N": 3}, 1.0),
    "causal, empty rows": (Mask(causal=True), {"M": 4, "N": 2}, 1.0),
    "causal, more keys": (Mask(causal=True), {"M": 2, "N": 4}, 1.0),
    "window": (Mask(window_left=1, window_right=1), {"M": 4, "N": 4}, 1.0),
    "window leaves keys unseen": (Mask(window_left=0, causal=True), {"M": 2, "N": 4}, 1.0),
    "lengths": (
        Mask(causal=True, seqlens_q=(1, 3), seqlens_k=(3, 2)),
        {"B": 2, "H": 1, "M": 3, "N": 3},
        1.0,
    ),
    "length 0": (Mask(seqlens_q=(2, 2), seqlens_k=(0, 2)), {"B": 2, "H": 1, "M": 2, "N": 2}, 1.0),
    "scores of hundreds": (Mask(), {"M": 3, "N": 4}, 30.0),
    "scores of 1e5": (Mask(causal=True), {"H": 1, "M": 3, "N": 3}, 400.0),
    "tiny scores": (Mask(), {"H": 1, "M": 2, "N": 3}, 1e-9),
    # A weight exp(s - lse) has the rounding error of lse, and here no other error.
    "ties at 6e4": (Mask(), {"H": 1, "M": 3, "N": 3}, 1.0),
}


SM_SCALE = 0.6


def inputs_of(case: str) -> tuple[Arrays, np.ndarray]:
    _, sizes, size = CASES[case]
    q, k, v, dout = draw(1, **sizes)
    if case == "ties at 6e4":
        q[..., 0] = k[..., 0] = (6e4 / SM_SCALE) ** 0.5
        v = 3 + 1e-3 * v
    return (size * q, size * k, v, dout), np.random.default_rng(2).standard_normal(q.shape[:3])


@functools.cache
def exact(case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """out and lse, and the two parts of each gradient, computed once for both tests of a case."""
    arrays, dlse = inputs_of(case)
    mask = CASES[case][0]
    with mpmath.workdps(DIGITS):
        forward = mp_forward(*arrays[:3], mask, SM_SCALE)
    with mpmath.workdps(DIFFERENCE_DIGITS):
        return forward, mp_gradients(arrays, dlse, mask, SM_SCALE)


def assert_within_half_the_bound(
    got: Outputs, want: dict[str, np.ndarray], allowed: Outputs[np.ndarray]
) -> None:
    for name in OUTPUTS:
        for index in np.ndindex(want[name].shape):
            a, b = float(getattr(got, name)[index]), want[name][index]
            with mpmath.workdps(DIGITS):
                error = 0 if mpmath.mpf(a) == b else abs(mpmath.mpf(a) - b)
            # The bound for float64 counts both reference and kernel, half for each.
            limit = float(getattr(allowed, name)[index]) / 2
            assert error <= limit, (
                f"{name}{list(index)}: got {a!r}, want {mpmath.nstr(b, 20)}, "
                f"error {mpmath.nstr(error, 3)}, bound {limit:.3g}"
            )


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("case", CASES)
def test_numpy_reference_is_within_half_its_bound_of_50_digit_arithmetic(
    case: str, with_dlse: bool
) -> None:
    arrays, dlse = inputs_of(case)
    inputs = {"mask": CASES[case][0], "sm_scale": SM_SCALE, "dlse": dlse if with_dlse else None}
    want, gradients = exact(case)
    with mpmath.workdps(DIGITS):
        want = want | {name: x[0] + with_dlse * x[1] for name, x in gradients.items()}
    assert_within_half_the_bound(attention(*arrays, **inputs), want, fp64_bound(arrays, **inputs))


@pytest.mark.parametrize("case", CASES)
def test_torch_reference_is_within_half_its_bound_of_50_digit_arithmetic(case: str) -> None:
    arrays, _ = inputs_of(case)
    inputs = {"mask": CASES[case][0], "sm_scale": SM_SCALE}
    want, gradients = exact(case)
    want = want | {name: x[0] for name, x in gradients.items()}
    got = torch_reference.attention(*map(torch.from_numpy, arrays), **inputs)
    assert_within_half_the_bound(got, want, fp64_bound(arrays, **inputs))


def small_masks() -> Iterator[tuple[Mask, int, int]]:
    """Every mask over at most 4 rows and 4 keys, windows up to one past the longest distance."""
    sides = (None, 0, 1, 2, 5)
    windows: list[dict[str, object]] = [
        {"window_left": left, "window_right": right} for left in sides for right in sides
    ]
    windows += [{"window_left": left, "causal": True} for left in sides]
    for M, N in itertools.product(range(5), range(5)):
        lengths = tuple(itertools.product(range(M + 1), range(N + 1)))
        for window in windows:
            yield Mask(**window), M, N  # type: ignore[arg-type]
            yield (
                Mask(
                    **window,  # type: ignore[arg-type]
                    seqlens_q=tuple(rows for rows, _ in lengths),
                    seqlens_k=tuple(keys for _, keys in lengths),
                ),
                M,
                N,
            )


def test_seen_keys_is_the_predicate_for_every_small_mask() -> None:
    for mask, M, N in small_masks():
        B = 1 if mask.seqlens_q is None else len(mask.seqlens_q)
        got = seen_keys(mask, B, M, N)
        for b, m, n in itertools.product(range(B), range(M), range(N)):
            assert got[b, m, n] == mask.is_visible(b, 0, m, n, M=M, N=N), (mask, M, N, b, m, n)


PADDED = Mask(causal=True, seqlens_q=(3, 5), seqlens_k=(4, 2))


@pytest.mark.parametrize("dirt", [np.nan, np.inf, np.finfo(np.float64).max])
def test_padding_changes_no_bit_of_any_output(dirt: float) -> None:
    arrays = draw(3, B=2, M=6, N=7)
    dirty = [x.copy() for x in arrays]
    dlse = np.ones((2, 2, 6))
    dirty_dlse = dlse.copy()
    for b in range(2):
        rows, keys = PADDED.seqlens_q[b], PADDED.seqlens_k[b]
        dirty_dlse[b, :, rows:] = dirt
        for x, length in zip(dirty, (rows, keys, keys, rows), strict=True):
            x[b, :, length:] = dirt
    clean = attention(*arrays, mask=PADDED, sm_scale=0.5, dlse=dlse)
    got = attention(*dirty, mask=PADDED, sm_scale=0.5, dlse=dirty_dlse)
    for name in OUTPUTS:
        np.testing.assert_array_equal(getattr(got, name), getattr(clean, name), err_msg=name)


def test_padding_keys_get_exactly_zero_gradient() -> None:
    got = attention(*draw(3, B=2, M=6, N=7), mask=PADDED, sm_scale=0.5)
    for b, keys in enumerate(PADDED.seqlens_k):
        assert not got.dk[b, :, keys:].any()
        assert not got.dv[b, :, keys:].any()


def test_rows_without_a_visible_key_give_zero_and_minus_infinity() -> None:
    got = attention(*draw(4, M=5, N=2), mask=Mask(causal=True), sm_scale=0.5)
    assert not got.out[:, :, :3].any()
    assert not got.dq[:, :, :3].any()
    assert np.all(got.lse[:, :, :3] == -np.inf)


def test_dout_of_rows_without_a_visible_key_is_ignored() -> None:
    q, k, v, dout = draw(4, M=5, N=2)
    dirty = dout.copy()
    dirty[:, :, :3] = np.nan
    clean = attention(q, k, v, dout, mask=Mask(causal=True), sm_scale=0.5)
    got = attention(q, k, v, dirty, mask=Mask(causal=True), sm_scale=0.5)
    for name in OUTPUTS:
        np.testing.assert_array_equal(getattr(got, name), getattr(clean, name), err_msg=name)


def test_a_hidden_key_of_huge_value_adds_nothing_to_a_row() -> None:
    q, k, v, dout = draw(5, H=1, M=4, N=4)
    huge_k, huge_v = k.copy(), v.copy()
    huge_k[:, :, 3], huge_v[:, :, 3] = 1e308, -1e308  # seen by the last row only
    clean = attention(q, k, v, dout, mask=Mask(causal=True), sm_scale=0.5)
    got = attention(q, huge_k, huge_v, dout, mask=Mask(causal=True), sm_scale=0.5)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(
            getattr(got, name)[:, :, :3], getattr(clean, name)[:, :, :3], err_msg=name
        )


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_empty_sequences_give_outputs_of_their_shape(sizes: tuple[int, int]) -> None:
    M, N = sizes
    got = attention(*draw(6, M=M, N=N), mask=Mask(causal=True), sm_scale=0.5)
    shapes = [(1, 2, M, 2), (1, 2, M), (1, 2, M, 3), (1, 1, N, 3), (1, 1, N, 2)]
    assert [x.shape for x in got] == shapes
    assert np.all(got.lse == -np.inf)


# Identities: a sum that is zero in exact arithmetic, and the same sum over the bounds.
Gap = Callable[..., np.ndarray]
IDENTITIES: dict[str, Gap] = {
    "sum of dk over keys is 0": lambda x, y, live: y.dk.sum(2),
    "sum of dv over keys is the sum of live dout": lambda x, y, live: (
        y.dv.sum(2) - (x[3] * live[..., None]).sum((1, 2))[:, None]
    ),
    "q.dq equals k.dk": lambda x, y, live: (x[0] * y.dq).sum() - (x[1] * y.dk).sum(),
    "v.dv equals out.dout": lambda x, y, live: (x[2] * y.dv).sum() - (y.out * x[3]).sum(),
}
BUDGETS: dict[str, Gap] = {
    "sum of dk over keys is 0": lambda x, B: B.dk.sum(2),
    "sum of dv over keys is the sum of live dout": lambda x, B: B.dv.sum(2),
    "q.dq equals k.dk": lambda x, B: (abs(x[0]) * B.dq).sum() + (abs(x[1]) * B.dk).sum(),
    "v.dv equals out.dout": lambda x, B: (abs(x[2]) * B.dv).sum() + (B.out * abs(x[3])).sum(),
}


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window_left=2, window_right=1)])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_gradient_identity_holds_within_the_bound(identity: str, mask: Mask) -> None:
    arrays = draw(7, B=2, H=3, M=9, N=7)
    sm_scale = 0.5
    got = attention(*arrays, mask=mask, sm_scale=sm_scale)
    gap = IDENTITIES[identity](arrays, got, got.lse != -np.inf)
    budget = BUDGETS[identity](arrays, fp64_bound(arrays, mask, sm_scale))
    assert np.all(np.abs(gap) <= budget), (gap, budget)
