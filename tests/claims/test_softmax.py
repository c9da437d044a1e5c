"""Claims K1 to K3 and K15: the online softmax, its base, the stored LSE, and the start of l."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees.compare import same_bits
from fa_verify.properties.inputs.families import TORCH_DTYPES
from tests.claims.launching import differentiate, tensors
from tests.claims.online import attend, blocks, ordered_partitions, softmax
from tests.mutation.catalogue.mutant import Edit

LN2, LOG2E = math.log(2), 1 / math.log(2)
# Rounding error of float64, in units of the sum of |terms|.
SHARE = 1e-12
FORWARD = "fa_kernels/kernels/portable/forward.py"
L_START = Edit(FORWARD, "l_i = tl.zeros([BLOCK_M], ACC)", "l_i = tl.full([BLOCK_M], 1.0, ACC)")


def close(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor | float = 1.0) -> bool:
    """Whether every element is within rounding. Equal infinities are close; NaN is not."""
    return bool(((got == want) | ((got - want).abs() <= SHARE * terms)).all())


def of_lse(lse: torch.Tensor) -> torch.Tensor:
    """The sum of |terms| of a log-sum-exp."""
    return 1 + lse.abs().nan_to_num(posinf=0.0)


def test_k01_any_split_into_tiles_in_any_order_gives_the_exact_softmax_divided_once():
    """K1 holds for all 541 partitions of five keys, and for rows that see any subset of them."""
    N = 5
    seen = torch.tensor([[row >> key & 1 for key in range(N)] for row in range(2**N)]).bool()
    scores, v = 30 * normal(1, "scores", (2**N, N)), normal(1, "v", (N, 3))
    hidden = scores.masked_fill(~seen, -math.inf)
    want, terms = softmax(scores, v, seen), softmax(scores, v.abs(), seen).out
    for tiles in ordered_partitions(tuple(range(N))):
        got = attend(hidden, v, tiles)
        assert close(got.out, want.out, terms), tiles
        assert close(got.lse, want.lse, of_lse(want.lse)), tiles


@pytest.mark.parametrize("direction", [1, -1], ids=["largest_last", "largest_first"])
def test_k01_a_maximum_that_moves_in_every_tile_costs_nothing(direction):
    """K1 holds for scores that rise by 0.1 per key, with the largest in the last of 63 tiles."""
    scores = direction * torch.linspace(-50, 50, 1000, dtype=torch.float64)[None]
    v = normal(2, "v", (1000, 3))
    got, want = attend(scores, v, blocks(1000, 16)), softmax(scores, v)
    assert close(got.out, want.out, softmax(scores, v.abs()).out)
    assert close(got.lse, want.lse, of_lse(want.lse))


def test_k02_base_2_changes_nothing_and_m_plus_log2_l_is_the_lse_in_base_2():
    """K2 holds: l and out equal those in base e, and ln 2 times the LSE is the public LSE."""
    scores, v = 10 * normal(3, "scores", (7, 50)), normal(3, "v", (50, 3))
    natural = attend(scores, v, blocks(50, 16))
    binary = attend(scores * LOG2E, v, blocks(50, 16), exp=torch.exp2)
    want = softmax(scores, v)
    assert close(binary.l, natural.l, natural.l)
    assert close(binary.out, want.out, softmax(scores, v.abs()).out)
    lse2 = binary.m + binary.l.log2()
    assert close(lse2, torch.exp2(scores * LOG2E).sum(1).log2(), of_lse(lse2))
    assert close(lse2 * LN2, want.lse, of_lse(want.lse))


@pytest.mark.parametrize("key", [0, 1, 16, 388, -388])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_k03_rows_of_p_from_the_stored_lse_sum_to_1_within_the_error_model(
    kernels, device, dtype, key
):
    """K3 holds. With the identity as dout, dv is P'; the LSE is near 256 * ``key``."""
    M, N, D = 16, 40, 16
    q, k, v = (normal(4, str(rows), (rows, D)) / 2 for rows in (M, N, N))
    q[:, 0], k[:, 0] = 256, key
    inputs = tensors(device, TORCH_DTYPES[dtype], q, k, v, torch.eye(M))
    got = differentiate(kernels, *inputs, sm_scale=1.0)
    bound = judge(*inputs, mask=Mask(), sm_scale=1.0, in_dtype=dtype, numerics=Numerics())
    assert bound.out_of_range is None
    sums = got.dv[0, 0].double().sum(0)
    assert ((sums - 1).abs() <= bound.bound.dv[0, 0].sum(0)).all()


def test_k03_a_rounded_lse_scales_its_row_by_the_exponential_of_the_rounding():
    """K3's error: a row sums to exp(LSE - stored LSE), up to 0.4 % off at |LSE| = 1e5."""
    offsets = torch.tensor([0.0, 1e2, 1e3, 1e4, 1e5, -1e5], dtype=torch.float64)
    scores = offsets[:, None] + normal(5, "scores", (6, 200))
    lse = torch.logsumexp(scores, 1)
    stored = lse.float().double()
    sums = torch.exp(scores - stored[:, None]).sum(1)
    assert close(sums, torch.exp(lse - stored), of_lse(lse))
    assert ((sums - 1).abs() <= torch.expm1(2.0**-24 * lse.abs())).all()
    assert (sums - 1).abs().max() > 1e-4


@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(causal=True),
        Mask(causal=True, seqlens_q=(40, 20), seqlens_k=(0, 33)),
        Mask(window_left=3, window_right=2, seqlens_k=(20, 5)),
    ],
    ids=["full", "causal", "causal_padding", "window_padding"],
)
def test_k15_l_may_start_at_1_where_m_starts_at_minus_infinity(kernels, edited, device, mask):
    """K15 holds bitwise in a kernel whose l starts at 1.

    With M > N some rows see no key, both in visited and in skipped tiles.
    """
    copy = edited("k15_l_starts_at_1", L_START)
    shapes = {"q": (2, 1, 40, 8), "k": (2, 1, 33, 8), "v": (2, 1, 33, 8), "dout": (2, 1, 40, 8)}
    inputs = [normal(6, name, shape).float().to(device) for name, shape in shapes.items()]
    got, want = (differentiate(package, *inputs, mask=mask) for package in (copy, kernels))
    assert (want.lse == -math.inf).any() == (mask != Mask())
    assert all(same_bits(x, y).all() for x, y in zip(got, want, strict=True))


def test_k15_for_a_row_without_a_key_the_1_lasts_until_its_first_tile():
    """K15 replaces 0/0 by 0/1 = 0 only for rows that visit no tile.

    In a hidden tile the pivot is 0, since -inf - -inf is NaN, and exp(-inf - 0) resets l to 0.
    """
    hidden, v = torch.full((1, 4), -math.inf, dtype=torch.float64), normal(7, "v", (4, 2))
    unvisited, visited = (attend(hidden, v, x, start=(1.0, -math.inf)) for x in ([], [[0, 1]]))
    assert (unvisited.acc / unvisited.l == 0).all()
    assert unvisited.lse == -math.inf
    assert visited.l == 0
    assert (visited.acc / visited.l).isnan().all()


@pytest.mark.parametrize("offset", [-14.0, 0.0])
def test_k15_beside_a_finite_m_a_1_in_l_counts_as_one_more_key(edited, device, offset):
    """K15 is wrong with a finite m: m = -20 and l = 1 act as a key with score -20 and value 0.

    The score in base 2 is -20 ln 2 = -13.9 in base e. Rows with scores near it lose half of their
    output, and a row without a visible key has an LSE of -13.9.
    """
    start = Edit(
        FORWARD,
        'm_i = tl.full([BLOCK_M], -float("inf"), ACC)',
        "m_i = tl.full([BLOCK_M], -20.0, ACC)",
    )
    copy = edited("k15_m_starts_at_minus_20", L_START, start)
    M, N = 40, 33
    scores, v = normal(8, "scores", (M, N)) + offset, normal(8, "v", (N, 8))
    seen = Mask(causal=True).dense(1, 1, M, N)[0, 0]
    inputs = tensors(device, torch.float64, scores, torch.eye(N), v, torch.ones(M, 8))
    got = differentiate(copy, *inputs, sm_scale=1.0, causal=True)
    truth = softmax(scores, v, seen)
    lse = torch.logaddexp(truth.lse, torch.tensor(-20 * LN2, dtype=torch.float64))
    share = torch.exp(truth.lse - lse)
    assert close(got.lse[0, 0].cpu(), lse, of_lse(lse))
    terms = softmax(scores, v.abs(), seen).out
    assert close(got.out[0, 0].cpu(), truth.out * share[:, None], terms)
    assert (lse[:7] == -20 * LN2).all()
