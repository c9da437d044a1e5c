"""Claims K4, K11, K17 and K18: the row sum delta, and pre-scaled operands."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference import torch_reference
from fa_verify.oracles.reference.numpy_reference import Head, attend_head
from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.inputs.families import TORCH_DTYPES
from tests.claims.launching import differentiate, tensors
from tests.mutation.catalogue.mutant import Edit

LN2, LOG2E = math.log(2), 1 / math.log(2)
# Rounding error of float64, in units of the sum of |terms|.
SHARE = 1e-12
UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
LOSS_BY_UNDERFLOW = {"fp16": 2.0**-25, "bf16": 2.0**-126}
FORWARD, DKDV, DQ = (f"fa_kernels/kernels/portable/{name}.py" for name in ("forward", "dkdv", "dq"))
SUM_IN_THE_TILE = Edit(
    DQ, "ds = p * (dp - rows.delta[:, None])", "ds = p * (dp - tl.sum(p * dp, 1)[:, None])"
)
ROUNDED_Q = Edit(
    FORWARD,
    "qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)",
    "q = (q * base2_scale(sm_scale, ACC, SCORE_MODS)).to(q.dtype)\n    qk_scale = 1.0",
)
ROUNDED_K = Edit(
    DKDV,
    "qk_scale = base2_scale(sm_scale, ACC, SCORE_MODS)",
    "keys = _KeyTile((k * base2_scale(sm_scale, ACC, SCORE_MODS)).to(k.dtype), v, offs_n)\n"
    "    qk_scale = 1.0",
)


def head(M: int, N: int, D: int, Dv: int, *, seen: np.ndarray | None = None) -> Head:
    """Forward and analytic gradients of one head in float64."""
    drawn = (
        normal(1, f"{x}", shape).numpy()
        for x, shape in enumerate([(M, D), (N, D), (N, Dv), (M, Dv)])
    )
    seen = np.ones((M, N), dtype=np.bool_) if seen is None else seen
    return attend_head(*drawn, np.zeros(M), seen, D**-0.5)


def test_k04_delta_is_the_row_sum_of_dp_p_and_of_do_o():
    """K4 holds, also for masked rows."""
    x = head(70, 60, 16, 24, seen=np.tri(70, 60, -5, dtype=np.bool_))
    sums = (x.dprobs_mn * x.probs_mn).sum(1)
    terms = (np.abs(x.dprobs_mn) * x.probs_mn).sum(1)
    assert (np.abs(sums - (x.dout_me * x.out_me).sum(1)) <= SHARE * terms).all()


def test_k04_the_delta_kernel_reads_no_key(kernels):
    """K4 costs O(N D): the kernel receives neither k nor v nor their length."""
    delta = inspect.signature(
        kernels.kernels.portable.bwd_preprocess.bwd_preprocess_kernel.fn
    ).parameters
    assert {"out_ptr", "dout_ptr", "M", "Dv"} <= set(delta)
    assert not {"k_ptr", "v_ptr", "N", "D"} & set(delta)


@pytest.mark.parametrize("Dv", [1, 64])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_k04_delta_of_the_rounded_out_costs_what_the_model_says(dtype, Dv):
    """K4 errs by at most |dout| . (u |out| + eta), with mean square u^2/6 (out dout)^2."""
    x = head(1000, 50, 16, Dv)
    out, dout = torch.from_numpy(x.out_me), torch.from_numpy(x.dout_me)
    error = (dout * (out.to(TORCH_DTYPES[dtype]).double() - out)).sum(1)
    u, eta = UNIT_ROUNDOFF[dtype], LOSS_BY_UNDERFLOW[dtype]
    share = (error.abs() / (dout.abs() * (u * out.abs() + eta)).sum(1)).max()
    assert share <= 1
    # The bound is attained for one product; roundings of many products cancel.
    assert (share > 0.9) == (Dv == 1)
    predicted = u**2 / 6 * (out * dout).square().sum(1)
    # A thousand independent rows determine the mean square to about 5 %.
    assert 0.8 < (error.square() / predicted).mean() < 1.2


def test_k11_a_row_sum_over_the_tile_is_wrong_as_soon_as_a_row_spans_two():
    """K11 is wrong: with P = (1/2, 1/2) and dP = (1, 0), dS is (1/4, 0) in place of (1/4, -1/4)."""
    p, dp = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])

    def by_tiles(edges: list[int]) -> list[float]:
        parts = ((p[lo:hi], dp[lo:hi]) for lo, hi in pairwise(edges))
        return torch.cat([x * (y - (x * y).sum()) for x, y in parts]).tolist()

    assert by_tiles([0, 2]) == [0.25, -0.25]
    assert by_tiles([0, 1, 2]) == [0.25, 0.0]


@pytest.mark.parametrize(("N", "right"), [(16, True), (17, False)])
def test_k11_a_kernel_with_that_sum_is_right_for_one_tile_and_wrong_for_two(
    edited, device, N, right
):
    """K11 in a kernel, in float64: N = 16 within rounding, N = 17 nowhere."""
    copy = edited("k11_sum_in_the_tile", SUM_IN_THE_TILE)
    q, k, v, dout = (normal(2, str(place), (rows, 16)) for place, rows in enumerate((20, N, N, 20)))
    inputs = tensors(device, torch.float64, q, k, v, dout)
    truth = torch_reference.attention(*inputs, mask=Mask(), sm_scale=0.25)
    judged = judge(*inputs, mask=Mask(), sm_scale=0.25, in_dtype="fp64", numerics=Numerics())
    ratio = ratios(differentiate(copy, *inputs).dq, truth.dq, judged.bound.dq)
    assert (ratio <= 1).all() if right else (ratio > 1).all()


def rounded_scores(q: torch.Tensor, k: torch.Tensor, operand: str, dtype: str) -> torch.Tensor:
    """Scores in base e, from q or k scaled by log2(e) and rounded; float64 beyond that."""
    if operand == "q":
        q = (q * LOG2E).to(TORCH_DTYPES[dtype]).double()
    else:
        k = (k * LOG2E).to(TORCH_DTYPES[dtype]).double()
    return (q @ k.T) * LN2


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_k17_passes_that_round_different_operands_make_p_sum_away_from_1(dtype, size):
    """K17 is wrong: with q rounded forward and k backward a row sums to exp(LSE_k - LSE_q).

    Each LSE exceeds the bound without pre-scaling and lies within the bound with it. If both passes
    round the same operand, rows sum to 1.
    """
    M, N, D = 40, 30, 16
    q, k = (
        (size * normal(3, x, (rows, D))).to(TORCH_DTYPES[dtype]).double()
        for x, rows in (("q", M), ("k", N))
    )
    v, dout = normal(3, "v", (N, 8)), normal(3, "dout", (M, 8))
    inputs = tensors("cpu", torch.float64, q, k, v, dout)
    scores = {x: rounded_scores(q, k, x, dtype) for x in ("q", "k")}
    lse = {x: torch.logsumexp(scores[x], 1) for x in scores}
    true_lse = torch.logsumexp(q @ k.T, 1)
    limits = {
        x: judge(
            *inputs, mask=Mask(), sm_scale=1.0, in_dtype=dtype, numerics=Numerics(prescales=x)
        ).bound.lse[0, 0]
        for x in ("none", "q", "k")
    }
    for operand in ("q", "k"):
        error = (lse[operand] - true_lse).abs()
        assert (error <= limits[operand]).all()
        assert (error > limits["none"]).any()
        consistent = torch.exp(scores[operand] - lse[operand][:, None]).sum(1)
        assert ((consistent - 1).abs() <= SHARE * (1 + lse[operand].abs())).all()
    sums = torch.exp(scores["k"] - lse["q"][:, None]).sum(1)
    assert (sums.log().abs() <= limits["q"] + limits["k"]).all()
    assert ((sums - 1).abs().max() > 0.1) == (size > 1)


def test_k17_in_a_kernel_only_the_bound_with_both_roundings_holds(edited, device):
    """K17 in a bf16 kernel with scores up to 770; unit vectors as dout make dv = P'.

    Rows sum to 0.8 to 3.8, and dv errs by up to 270 times the bound without pre-scaling.
    """
    copy = edited("k17_rounds_different_operands", ROUNDED_Q, ROUNDED_K)
    q, k, v = (8 * normal(4, str(rows), (rows, 16)) for rows in (16, 30, 30))
    inputs = tensors(device, torch.bfloat16, q, k, v, torch.eye(16))
    want = torch_reference.attention(*inputs, mask=Mask(), sm_scale=1.0).dv
    got = differentiate(copy, *inputs, sm_scale=1.0).dv
    worst = {}
    for prescales in ("none", "qk"):
        numerics = Numerics(prescales=prescales)
        judged = judge(*inputs, mask=Mask(), sm_scale=1.0, in_dtype="bf16", numerics=numerics)
        worst[prescales] = ratios(got, want, judged.bound.dv).max()
    assert worst["none"] > 100
    assert worst["qk"] <= 1
    assert (got.double().sum(2) - 1).abs().max() > 1


SCALE = 0.3
FACTORS = {
    # (scaled operand, factor): (factor on dS K, factor on dS' Q), with the scaled K or Q.
    ("k", SCALE * LOG2E): (LN2, SCALE),
    ("k", LOG2E): (SCALE * LN2, SCALE),
    ("q", SCALE * LOG2E): (SCALE, LN2),
    ("q", LOG2E): (SCALE, SCALE * LN2),
}


@pytest.mark.parametrize(("operand", "by"), FACTORS, ids=lambda x: str(x)[:5])
def test_k18_the_gradient_that_reads_a_scaled_operand_divides_its_factor_out(operand, by):
    """K18 corrected: with k scaled by sm_scale log2(e), dq takes ln 2 and dk takes sm_scale.

    With log2(e) alone dq takes sm_scale ln 2; a scaled q exchanges the two gradients.
    """
    x = head(20, 30, 16, 8)
    exact = attend_head(x.q_md, x.k_nd, x.v_ne, x.dout_me, x.dlse_m, x.seen_mn, SCALE)
    q, k = (by * y if operand == name else y for name, y in (("q", x.q_md), ("k", x.k_nd)))
    of_dq, of_dk = FACTORS[operand, by]
    ds = exact.dscores_mn
    for got, want, terms in (
        (of_dq * (ds @ k), exact.dq_md, np.abs(ds) @ np.abs(k)),
        (of_dk * (ds.T @ q), exact.dk_nd, np.abs(ds).T @ np.abs(q)),
    ):
        assert (np.abs(got - want) <= SHARE * terms).all()
