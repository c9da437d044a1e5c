import dataclasses
import math

import pytest
import torch
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.inputs.families import TORCH_DTYPES, last_visible
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.problems.strategies import problems
from tests.unit.properties.problems.sampling import drawn

HALF = ("fp16", "bf16")
LONG = Problem(B=2, H=4, Hk=2, M=61, N=67, D=64, Dv=48, mask=Mask(causal=True))
SHIFTS = {
    "lse_low_90": -90.0,
    "lse_low_130": -130.0,
    "lse_low_6e3": -6e3,
    "lse_low_1e5": -9.9e4,
    "lse_high_6e4": 6e4,
    "lse_high_1e5": 9.9e4,
}
# Families that determine their scores up to a rounding.
LEVELLED = ("near_ties", "rising_max", "two_level", "p_underflow")


def scores(problem):
    """Scaled scores in float64, unmasked, (B, H, M, N)."""
    inputs = make(problem)
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(problem.G, 1)
    return q @ k.mT * problem.scale


def visible_keys(problem, b, m):
    return [
        n for n in range(problem.N) if problem.mask.is_visible(b, 0, m, n, M=problem.M, N=problem.N)
    ]


@pytest.mark.parametrize(("inputs", "factor"), [("times8", 8), ("times40", 40)])
def test_scores_spread_by_the_factor(inputs, factor):
    spread = scores(dataclasses.replace(LONG, inputs=inputs)).std() / scores(LONG).std()
    # M D values determine the spread of q to a relative 1/sqrt(2 M D) = 0.8 %; the rest is margin.
    assert 0.9 * factor < spread < 1.1 * factor


@pytest.mark.parametrize("inputs", SHIFTS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [1, 3, 128])
@pytest.mark.parametrize("sm_scale", [0.02, None, 2.0])
def test_every_lse_is_near_the_shift(inputs, dtype, D, sm_scale):
    problem = Problem(M=17, N=33, D=D, dtype=dtype, inputs=inputs, sm_scale=sm_scale)
    lse = scores(problem).logsumexp(-1)
    # q and k of the constant channel are rounded once each. The other channels' scores have a
    # spread of at most 1, and their log-sum-exp over 33 keys adds little more than log 33.
    rounding = 2 * torch.finfo(TORCH_DTYPES[dtype]).eps * abs(SHIFTS[inputs])
    assert ((lse - SHIFTS[inputs]).abs() < rounding + 2 * math.log(33)).all()


@pytest.mark.parametrize("inputs", ["lse_low_1e5", "lse_high_1e5"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 128])
@pytest.mark.parametrize("sm_scale", [0.02, 0.06, None, 2.0])
def test_no_lse_passes_the_limit_of_what_is_promised(inputs, dtype, D, sm_scale):
    problem = Problem(M=17, N=33, D=D, dtype=dtype, inputs=inputs, sm_scale=sm_scale)
    assert (scores(problem).logsumexp(-1).abs() <= 1e5).all()


@pytest.mark.parametrize("inputs", LEVELLED)
def test_rows_and_keys_differ_even_where_their_scores_do_not(inputs):
    made = make(dataclasses.replace(LONG, inputs=inputs))
    for tensor in (made.q, made.k):
        assert tensor[0, 0].unique(dim=0).shape[0] == tensor.shape[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm_scale", [0.02, None, 2.0])
def test_near_ties_lie_a_few_ulps_apart(dtype, sm_scale):
    problem = dataclasses.replace(LONG, inputs="near_ties", dtype=dtype, sm_scale=sm_scale)
    s = scores(problem)
    spread = s.amax(-1) - s.amin(-1)
    coarse, fine = (16 * torch.finfo(x).eps for x in (TORCH_DTYPES[dtype], torch.float32))
    # Eight steps of an ulp; the rest allows for the roundings of q, k and this product.
    for rows, ulp in ((slice(0, None, 2), coarse), (slice(1, None, 2), fine)):
        assert (spread[:, :, rows] < 10 * ulp).all()
        assert (spread[:, :, rows] > 6 * ulp).all()
    assert ((s - 16).abs() < 10 * max(coarse, fine)).all()


def tile_maxima(problem, tile=16):
    """The largest score of each whole key tile, (tiles, B, H, M)."""
    return torch.stack([part.amax(-1) for part in scores(problem).split(tile, -1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_ties_move_the_running_maximum_from_tile_to_tile(dtype):
    maxima = tile_maxima(dataclasses.replace(LONG, inputs="near_ties", dtype=dtype))
    assert (maxima[1:-1] > maxima[:-2]).all()


def test_near_ties_of_one_channel_are_close_to_0():
    s = scores(dataclasses.replace(LONG, inputs="near_ties", dtype="fp16", D=1))
    assert s.abs().max() < 10 * 16 * 2.0**-10
    assert s.amax() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seed", "step"), [(0, 1.0), (1, 4.0), (2, 12.0), (3, 22.0), (4, 1.0)])
def test_the_maximum_rises_from_tile_to_tile_by_what_the_seed_says(seed, step, dtype):
    maxima = tile_maxima(dataclasses.replace(LONG, inputs="rising_max", dtype=dtype, seed=seed))
    # q and k are rounded once each; scores are up to four steps.
    rounding = 4 * step * 2 * torch.finfo(TORCH_DTYPES[dtype]).eps
    assert maxima.shape[0] == 5
    assert ((maxima.diff(dim=0) - step).abs() <= rounding).all()


@pytest.mark.parametrize(("N", "width"), [(400, 16), (512, 16), (1000, 32), (2000, 64)])
def test_the_maximum_rises_to_110_in_at_most_32_steps_that_no_threshold_notices(N, width):
    maxima = tile_maxima(Problem(M=2, N=N, inputs="rising_max", dtype="bf16", seed=1), width)
    steps, rise = maxima.diff(dim=0), maxima[-1] - maxima[0]
    assert len(maxima) <= 32
    assert (steps > 0).all()
    # Rescales may be put off until a maximum rises by 8 powers of 2.
    assert steps.amax() < 8 * math.log(2)
    # Past the largest exponent of exp in float32.
    assert 88.8 < rise.amin()
    assert rise.amax() < 112


def test_rows_of_cosine_attention_have_length_1():
    for D in (1, 2, 5, 64, 127):
        made = make(dataclasses.replace(LONG, inputs="cosine", dtype="fp64", D=D))
        for x in (made.q, made.k):
            assert ((x.square().sum(-1) - 1).abs() < 1e-14).all()


def test_large_scales_are_drawn_for_cosine_attention_alone():
    found = drawn(problems(), 1500)
    large = [x.scale for x in found if x.inputs == "cosine"]
    assert {x.inputs for x in found if x.scale > 2} == {"cosine"}
    assert sum(x > 16 for x in large) >= 0.2 * len(large)
    assert sum(x < 16 for x in large) >= 0.2 * len(large)
    assert max(large) == 128


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("sm_scale", [0.25, 1.0])
def test_swept_scores_are_all_numbers_of_16_bits(dtype, sm_scale):
    problem = Problem(
        B=2, H=2, Hk=1, M=2**14, N=3, D=1, Dv=1, dtype=dtype, sm_scale=sm_scale,
        inputs="swept_scores",
    )  # fmt: skip
    got = scores(problem) / sm_scale
    assert (got[..., 1] == 0).all()
    assert torch.equal(got[..., 0], got[..., 2])
    kind = torch.float16 if dtype == "fp16" else torch.bfloat16
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind).double()
    every = every[every.abs() * sm_scale <= 1e5]
    # The largest is 9.9e4, rounded.
    assert every.unique().numel() - got[..., 0].unique().numel() <= 4
    assert set(got[..., 0].unique().tolist()) <= set(every.tolist())


def test_swept_scores_of_few_rows_have_every_size():
    problem = Problem(H=4, Hk=4, M=100, N=2, D=1, Dv=1, dtype="bf16", inputs="swept_scores")
    x = scores(problem)[..., 0].flatten()
    exponents = x.abs().clamp(min=2.0**-140).log2().floor()
    for sign in (x > 0, x < 0):
        assert set(exponents[sign].tolist()) >= set(range(-126, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_level_has_scores_of_0_and_of_about_minus_8_alone(dtype):
    low, high = scores(dataclasses.replace(LONG, inputs="two_level", dtype=dtype)).unique().tolist()
    assert high == 0
    assert abs(low + 8) <= 8 * 2 * torch.finfo(TORCH_DTYPES[dtype]).eps


def test_two_level_has_half_of_the_keys_at_each_level_of_each_head():
    high = (scores(dataclasses.replace(LONG, inputs="two_level", N=400)) == 0).double().mean((2, 3))
    # For 400 keys the share has a standard deviation of 0.025.
    assert ((high - 0.5).abs() < 0.1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm_scale", [0.02, None, 2.0])
def test_p_underflow_has_subnormal_and_vanished_p_in_every_row(dtype, sm_scale):
    problem = dataclasses.replace(LONG, inputs="p_underflow", dtype=dtype, sm_scale=sm_scale, N=300)
    s = scores(problem)
    p = (s - s.amax(-1, keepdim=True)).exp().to(TORCH_DTYPES[dtype])
    normal = p >= torch.finfo(p.dtype).tiny
    assert ((p == 0).double().mean(-1) > 0.1).all()
    assert (((p > 0) & ~normal).double().mean(-1) > 0.1).all()
    assert (normal & (p < 1)).any()


def test_p_underflow_has_one_key_in_16_at_the_maximum():
    s = scores(dataclasses.replace(LONG, inputs="p_underflow", seed=5))
    peaks = s == s.amax(-1, keepdim=True)
    want = torch.arange(LONG.N) % 16 == 5
    assert (peaks == want).all()


@pytest.mark.parametrize("seed", range(5))
def test_p_underflow_has_a_peak_among_few_keys(seed):
    assert scores(Problem(N=3, inputs="p_underflow", seed=seed)).amax() == 0


def test_duplicated_keys_repeat_at_once_and_in_other_tiles():
    k = make(dataclasses.replace(LONG, inputs="duplicated_keys")).k
    assert torch.equal(k[:, :, 0:-1:2], k[:, :, 1::2])
    assert torch.equal(k[:, :, 14:], k[:, :, :-14])
    assert all(head.unique(dim=0).shape[0] == 7 for head in k.flatten(0, 1))


def test_duplicated_keys_have_values_of_their_own():
    v = make(dataclasses.replace(LONG, inputs="duplicated_keys")).v
    assert all(head.unique(dim=0).shape[0] == LONG.N for head in v.flatten(0, 1))


@given(problems(max_seqlen=24))
def test_the_last_visible_key_is_that_of_the_predicate(problem):
    got = last_visible(problem).tolist()
    for b in range(problem.B):
        want = [max(visible_keys(problem, b, m), default=-1) for m in range(problem.M)]
        assert got[b] == want


def needle_weight(problem, key):
    """The unmasked weight of each row (b, m) at its own key, for every head."""
    weights = scores(problem).softmax(-1)
    rows = [(b, m) for b in range(problem.B) for m in range(problem.M)]
    return {(b, m): weights[b, :, m, key(b, m)].min().item() for b, m in rows}


def spread_rows(problem, weights):
    """(batch entry, quarter) of every row with more than 0.9 of its weight at its key."""
    dominated = [(b, m) for (b, m), weight in weights.items() if weight > 0.9]
    return {(b, 4 * m // problem.M) for b, m in dominated}


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window_left=9, window_right=3)])
def test_needle_visible_fills_the_last_visible_key_all_along_the_sequence(mask):
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_visible")
    weights = needle_weight(problem, lambda b, m: max(visible_keys(problem, b, m)))
    assert len(spread_rows(problem, weights)) == 8


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window_left=9, window_right=3)])
def test_needle_hidden_fills_the_first_hidden_key_all_along_the_sequence(mask):
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_hidden")
    last = problem.N - 1
    weights = needle_weight(problem, lambda b, m: min(max(visible_keys(problem, b, m)) + 1, last))
    assert len(spread_rows(problem, weights)) == 8


def test_needle_hidden_stays_on_the_last_visible_key_where_none_is_hidden():
    problem = dataclasses.replace(LONG, mask=Mask(), inputs="needle_hidden")
    weights = needle_weight(problem, lambda b, m: problem.N - 1)
    assert len(spread_rows(problem, weights)) == 8


def test_needle_hidden_never_aims_at_padding():
    mask = Mask(seqlens_k=(40, 67))
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_hidden")
    weights = needle_weight(problem, lambda b, m: mask.seqlens_k[b] - 1)
    assert len(spread_rows(problem, weights)) == 8
