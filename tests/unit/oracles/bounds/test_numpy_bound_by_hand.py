"""The NumPy bound of tiny problems against scalar formulas at 50 digits.

The formulas here do not avoid cancellation, so the bound's own rearrangements are tested too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import mpmath
import numpy as np
import pytest

from fa_verify.oracles.bounds.in_numpy.bound import bound
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics

AGREEMENT = 1e-10  # relative difference allowed between the two implementations


@pytest.fixture(autouse=True)
def _fifty_digits() -> Iterator[None]:
    with mpmath.workdps(50):
        yield


class Constants(NamedTuple):
    """The model's constants of a dtype and its dots; a float64 kernel doubles the errors."""

    dtype: str
    u: float
    flush: float
    u_exp: float
    u_in: float
    eta: float
    u_x: float = 0.0
    times: int = 1
    eta_x: float = 0.0  # without the 2**-136 of a subnormal operand in TF32

    @property
    def ud(self) -> mpmath.mpf:
        return (1 + mpmath.mpf(self.u_x)) ** 2 - 1

    @property
    def uc(self) -> mpmath.mpf:
        return (1 + mpmath.mpf(self.u_in)) * (1 + mpmath.mpf(self.u_x)) ** 2 - 1

    def chain(self, n: int) -> mpmath.mpf:
        return n * mpmath.mpf(self.u) / (1 - n * mpmath.mpf(self.u))


RUNGS = {
    "fp16": Constants("fp16", 2.0**-24, 2.0**-126, 2.0**-22, 2.0**-11, 2.0**-25, eta_x=2.0**-34),
    "bf16": Constants("bf16", 2.0**-24, 2.0**-126, 2.0**-22, 2.0**-8, 2.0**-126),
    "fp32": Constants("fp32", 2.0**-24, 2.0**-126, 2.0**-22, 2.0**-24, 2.0**-126),
    "tf32": Constants("fp32", 2.0**-24, 2.0**-126, 2.0**-22, 2.0**-24, 2.0**-126, 2.0**-10),
    "fp64": Constants("fp64", 2.0**-53, 2.0**-1022, 2.0**-51, 2.0**-53, 2.0**-1022, 0.0, 2),
}


def bound_of(rung: str, q, k, v, dout, *, t: float = 1.0, prescales: str = "none"):
    """The bound for one row and any number of keys, each given as nested lists or arrays."""
    arrays = (np.asarray(x, dtype=np.float64) for x in (q, k, v, dout))
    numerics = Numerics(dots="tf32" if rung == "tf32" else "ieee", prescales=prescales)
    return bound(*arrays, mask=Mask(), sm_scale=t, in_dtype=RUNGS[rung].dtype, numerics=numerics)


@pytest.mark.parametrize("rung", RUNGS)
def test_one_zero_key_has_the_bound_computed_by_hand(rung: str) -> None:
    c = RUNGS[rung]
    one, zero = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 1))
    limits = bound_of(rung, zero, zero, one, zero)
    # One visible key with score 0: s = m = L = 0, p = 1, out = v = 1, one tile of 16 keys, E is
    # the error of one exponential.
    core = mpmath.exp(2 * c.u_exp) * (c.uc + c.chain(18) * (1 + c.uc) + c.eta_x) + c.eta + c.flush
    core += (c.chain(22) + 4 * c.u) * (1 + core)
    out = c.times * (core + c.u_in * (1 + core) + c.eta)
    lse = c.times * (c.u_exp + c.chain(22) + c.u_exp)
    assert math.isclose(limits.out.item(), out, rel_tol=AGREEMENT)
    assert math.isclose(limits.lse.item(), lse, rel_tol=AGREEMENT)


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_equal_scores_count_one_rescale_for_every_tile_after_the_first(tiles: int) -> None:
    c, N = RUNGS["fp32"], 16 * tiles
    zeros = [np.zeros((1, 1, rows, 4)) for rows in (1, N, N, 1)]
    lse = math.log(N)
    want = tiles * c.u_exp + c.chain(N + 2 * tiles + 4) + c.u_exp * (1 + lse) + 4 * c.u * lse
    assert math.isclose(bound_of("fp32", *zeros).lse.item(), want, rel_tol=AGREEMENT)


def test_a_running_maximum_that_changes_less_often_has_a_narrower_bound() -> None:
    def lse_bound(tile_scores: tuple[float, ...]) -> float:
        one, zero = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 48, 1))
        k = np.repeat(tile_scores, 16).reshape(1, 1, 48, 1)
        return bound_of("fp32", one, k, zero, one).lse.item()

    # The maximum changes once from both ends; twice from the left; twice from the right.
    once, twice_left, twice_right = (0.0, 10.0, 0.0), (0.0, 0.0, 10.0), (10.0, 0.0, 0.0)
    assert lse_bound(once) < min(lse_bound(twice_left), lse_bound(twice_right))


# The problem has one row, two keys, two equal heads in a group, and D = Dv = 1.
Q, KS, VS, DOUT = 2.0, (3.0, -1.0), (5.0, 0.25), 7.0


class Passes(NamedTuple):
    """The exact values of one head; values for each key are lists."""

    s: list[mpmath.mpf]
    m: mpmath.mpf
    lse: mpmath.mpf
    p: list[mpmath.mpf]
    out: mpmath.mpf
    dp: list[mpmath.mpf]
    delta: mpmath.mpf
    ds: list[mpmath.mpf]


def two_keys(t: float) -> Passes:
    s = [mpmath.mpf(t * Q * k) for k in KS]
    lse = mpmath.log(sum(mpmath.exp(x) for x in s))
    p = [mpmath.exp(x - lse) for x in s]
    out = sum(a * v for a, v in zip(p, VS, strict=True))
    dp = [mpmath.mpf(DOUT * v) for v in VS]
    ds = [a * (b - DOUT * out) for a, b in zip(p, dp, strict=True)]
    return Passes(s, max(s), lse, p, out, dp, DOUT * out, ds)


def lost_to_underflow(c: Constants, prescales: str, t: float) -> mpmath.mpf:
    """The error by underflow of a pre-scaled operand, in units of q or k."""
    whole, root = mpmath.log(2), mpmath.sqrt(t * mpmath.log(2))
    return c.eta * (max(whole, root) if prescales == "qk" else whole)


def score_errors(x: Passes, c: Constants, prescales: str, t: float) -> list[mpmath.mpf]:
    """E, where |s| is also the dot of magnitudes."""
    u_in = {"none": 0, "q": c.u_in, "k": c.u_in, "qk": (1 + mpmath.mpf(c.u_in)) ** 2 - 1}
    reach = [abs(k) * ("q" in prescales) + Q * ("k" in prescales) for k in KS]
    return [
        (c.chain(16) * (1 + c.ud) + c.ud + 5 * c.u * (1 + c.ud) + u_in[prescales]) * abs(s)
        + 3 * c.u * (x.m - s)
        + c.u_exp
        + lost_to_underflow(c, prescales, t) * y
        + t * c.eta_x * (Q + abs(k))
        for s, y, k in zip(x.s, reach, KS, strict=True)
    ]


def forward_by_hand(x: Passes, E: list[mpmath.mpf], c: Constants) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Bounds of out and lse."""
    z = sum(a * mpmath.exp(-e) for a, e in zip(x.p, E, strict=True))
    per_term = c.uc + c.chain(18) * (1 + c.uc)
    core = (c.eta + c.flush) * min(1, mpmath.exp(x.m - x.lse + 2 * max(E))) * sum(VS)
    for a, e, v in zip(x.p, E, VS, strict=True):
        core += a * ((mpmath.exp(e) - 1) * abs(v - x.out) + per_term * mpmath.exp(e) * v) / z
        core += c.eta_x * a * mpmath.exp(e) / z
    core += (c.chain(22) + 4 * c.u) * (x.out + core)
    lse = mpmath.log(sum(a * mpmath.exp(e) for a, e in zip(x.p, E, strict=True)))
    lse += c.chain(22) + c.u_exp * (1 + x.lse - x.m) + 4 * c.u * max(x.m, x.lse)
    return core + c.u_in * (x.out + core) + c.eta, lse


def bound_by_hand(rung: str, prescales: str, t: float) -> dict[str, list[mpmath.mpf]]:
    c, x = RUNGS[rung], two_keys(t)
    E = score_errors(x, c, prescales, t)
    out, lse = forward_by_hand(x, E, c)
    d_delta = DOUT * out + c.chain(5) * DOUT * (x.out + out)
    # Two heads with m' = 16: the chain of sums is 2 * 16 + 2 long for dk and dv, 16 + 2 for dq.
    per_dq, per_dk = (c.chain(n) * (1 + c.uc) for n in (18, 34))
    reused = lost_to_underflow(c, prescales, t)
    dq, B_dq, B_dk, B_dv = 0, 0, [], []
    for s, e, a, b, ds, k, v in zip(x.s, E, x.p, x.dp, x.ds, KS, VS, strict=True):
        grown = mpmath.exp(e + lse + 3 * c.u * (abs(s) + x.lse) + c.u_exp)
        given = (c.chain(16) * (1 + c.ud) + c.ud) * DOUT * v + d_delta
        given += c.eta_x * (DOUT + v)
        size = abs(b) + x.delta
        error = (grown - 1) * abs(b - x.delta) + grown * (given + 3 * c.u * (size + given))
        error = a * error + c.flush * (1 + size)
        top = abs(ds) + error
        cast = error + c.uc * top + c.eta * (1 + c.u_x)

        dq += t * ds * k
        B_dq += t * ((cast + per_dq * top) * abs(k) + c.eta_x * top)
        B_dq += ("k" in prescales) * top * (t * c.u_in * abs(k) + reused)
        dk, dv = 2 * t * Q * ds, 2 * DOUT * a
        b_dk = 2 * t * (Q * (cast + per_dk * top) + c.eta_x * top)
        b_dk += 2 * ("q" in prescales) * top * (t * c.u_in * Q + reused)
        b_dv = a * (grown - 1) + c.uc * a * grown + (c.eta + c.flush) * (1 + c.u_x)
        b_dv = 2 * (DOUT * (b_dv + per_dk * a * grown) + c.eta_x * a * grown)
        B_dk.append(b_dk + (c.u_in + 4 * c.u) * (abs(dk) + b_dk) + c.eta)
        B_dv.append(b_dv + c.u_in * (abs(dv) + b_dv) + c.eta)
    B_dq += (c.u_in + 4 * c.u) * (abs(dq) + B_dq) + c.eta
    each = {"out": [out] * 2, "lse": [lse] * 2, "dq": [B_dq] * 2, "dk": B_dk, "dv": B_dv}
    return {name: [c.times * y for y in values] for name, values in each.items()}


# With a large scale each operand has its square root; with a small one the factor ln 2 dominates.
@pytest.mark.parametrize("t", [0.5, 2.0])
@pytest.mark.parametrize("prescales", ["none", "q", "k", "qk"])
@pytest.mark.parametrize("rung", RUNGS)
def test_two_keys_have_the_bound_computed_by_hand(rung: str, prescales: str, t: float) -> None:
    want = bound_by_hand(rung, prescales, t)
    got = bound_of(
        rung,
        np.full((1, 2, 1, 1), Q),
        np.reshape(KS, (1, 1, 2, 1)),
        np.reshape(VS, (1, 1, 2, 1)),
        np.full((1, 2, 1, 1), DOUT),
        t=t,
        prescales=prescales,
    )
    for name in OUTPUTS:
        for x, y in zip(getattr(got, name).ravel(), want[name], strict=True):
            assert math.isclose(x, y, rel_tol=AGREEMENT), (name, x, y)
