from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.error_model import Judgement, judge
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference import torch_reference

B, H, Hk, M, N, D, Dv = 2, 4, 2, 41, 37, 16, 8
SCALE = 0.3
WINDOW = Mask(window_left=9, window_right=4, seqlens_q=(40, 20), seqlens_k=(30, 35))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPS = torch.finfo(torch.float64).eps


def tensors(in_dtype: str = "fp16", seed: int = 0) -> list[torch.Tensor]:
    shapes = {"q": (B, H, M, D), "k": (B, Hk, N, D), "v": (B, Hk, N, Dv), "dout": (B, H, M, Dv)}
    dtype = DTYPES.get(in_dtype, torch.float64)
    return [stream.normal(seed, name, shape).to(dtype) for name, shape in shapes.items()]


def judged(inputs: list[torch.Tensor], mask: Mask = WINDOW, **kwargs: Any) -> Judgement:
    numerics = Numerics(**{k: kwargs.pop(k) for k in list(kwargs) if k not in ("rows", "in_dtype")})
    kwargs.setdefault("in_dtype", "fp16")
    return judge(*inputs, mask=mask, sm_scale=SCALE, numerics=numerics, **kwargs)


def exact_places(mask: Mask) -> dict[str, torch.Tensor]:
    """Masks of exact outputs: rows without a visible key, and keys that no row sees."""
    seen = mask.dense(B, H, M, N).expand(B, H, M, N)
    empty = ~seen.any(3)
    unseen = ~seen.any(2).view(B, Hk, -1, N).any(2)
    return {"out": empty, "lse": empty, "dq": empty, "dk": unseen, "dv": unseen}


def tiled_attention(inputs: list[torch.Tensor], mask: Mask) -> Outputs[torch.Tensor]:
    """A FlashAttention-2 kernel in float32, P and dS cast to the inputs' dtype, tiles of 16."""
    dtype = inputs[0].dtype
    q, dout = (x.float() for x in (inputs[0], inputs[3]))
    k, v = (x.float().repeat_interleave(H // Hk, 1) for x in inputs[1:3])
    seen = mask.dense(B, H, M, N).expand(B, H, M, N)
    scores = (q @ k.mT * SCALE).masked_fill(~seen, -math.inf)
    m, total, acc = torch.full((B, H, M, 1), -math.inf), torch.zeros(B, H, M, 1), 0 * dout
    for tile in torch.arange(N).split(16):
        higher = torch.maximum(m, scores[..., tile].amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)
        p = torch.exp(scores[..., tile] - base)
        alpha = torch.exp(m - base)
        total = total * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p.to(dtype).float() @ v[..., tile, :]
        m = higher
    lse = m + total.log()
    out = (acc / total.masked_fill(total == 0, 1.0)).to(dtype)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0))
    ds = p * (dout @ v.mT - (out.float() * dout).sum(-1, keepdim=True))
    p, ds = (x.to(dtype).float() for x in (p, ds))
    dk, dv = (
        x.view(B, Hk, H // Hk, N, -1).sum(2).to(dtype) for x in (SCALE * (ds.mT @ q), p.mT @ dout)
    )
    return Outputs(out, lse.squeeze(-1), (SCALE * (ds @ k)).to(dtype), dk, dv)


def worst_ratios(in_dtype: str, seed: int) -> dict[str, float]:
    inputs = tensors(in_dtype, seed)
    want = torch_reference.attention(*inputs, mask=WINDOW, sm_scale=SCALE)
    bound = judged(inputs, in_dtype=in_dtype).bound
    ratios = {}
    for name, a, b, most in zip(OUTPUTS, tiled_attention(inputs, WINDOW), want, bound, strict=True):
        error = torch.where(a == b, 0.0, (a - b).abs())
        ratios[name] = torch.where(error == 0, 0.0, error / most).max().item()
    return ratios


@pytest.mark.parametrize("in_dtype", DTYPES)
def test_a_correct_kernel_is_within_the_bound(in_dtype: str) -> None:
    for seed in range(4):
        ratios = worst_ratios(in_dtype, seed)
        assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("in_dtype", ["fp16", "bf16"])
def test_the_bound_is_at_most_ten_times_the_error(in_dtype: str) -> None:
    ratios = worst_ratios(in_dtype, 0)
    assert all(ratios[name] > 0.1 for name in ("out", "dq", "dk", "dv")), ratios


@pytest.mark.parametrize("mask", [WINDOW, Mask(causal=True), Mask(causal=True, seqlens_k=(0, 9))])
@pytest.mark.parametrize("group_sum", ["fp32", "dtype"])
def test_the_bound_is_zero_exactly_where_the_truth_is_exact(mask: Mask, group_sum: str) -> None:
    judgement = judged(tensors(), mask, group_sum=group_sum)
    for name, places in exact_places(mask).items():
        assert places.any() or mask.seqlens_q is None
        bound = getattr(judgement.bound, name)
        assert (bound[places] == 0).all(), name
        assert (bound[~places] > 0).all(), name


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("group_sum", ["fp32", "dtype"])
def test_chunking_changes_nothing_but_roundings(rows: int, group_sum: str) -> None:
    whole = judged(tensors(), group_sum=group_sum)
    chunked = judged(tensors(), group_sum=group_sum, rows=rows)
    for a, b in zip(chunked.bound + chunked.terms, whole.bound + whole.terms, strict=True):
        assert ((a - b).abs() <= 16 * M * EPS * b).all()
    assert chunked.max_score == pytest.approx(whole.max_score, rel=16 * EPS)


@pytest.mark.parametrize("dirt", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [None, 16])
@pytest.mark.parametrize("group_sum", ["fp32", "dtype"])
def test_values_outside_visible_pairs_change_no_bit(
    dirt: float, rows: int | None, group_sum: str
) -> None:
    inputs = tensors()
    clean = judged(inputs, rows=rows, group_sum=group_sum)
    places = exact_places(WINDOW)
    for x, name in zip(inputs, ("dq", "dk", "dv", "out"), strict=True):
        x[places[name]] = dirt
    dirty = judged(inputs, rows=rows, group_sum=group_sum)
    assert all(map(torch.equal, dirty.bound + dirty.terms, clean.bound + clean.terms))
    assert (dirty.max_score, dirty.out_of_range) == (clean.max_score, None)


def test_a_hidden_pair_that_overflows_stays_out_of_the_bound() -> None:
    # Each row sees only its own key; the products of row 1 with key 0 overflow float64.
    diagonal = Mask(window_left=0, window_right=0, seqlens_q=(N, N))
    inputs = tensors("fp64")
    q, k, v, dout = inputs
    for x, row_0, row_1 in ((q, 0, 1e10), (k, 1e300, 0), (v, 1e305, 1), (dout, 0, 1e10)):
        x[:, :, 0] = row_0
        x[:, :, 1] = row_1
    judgement = judged(inputs, diagonal, in_dtype="fp64")
    assert all(x.isfinite().all() for x in judgement.bound + judgement.terms)
    assert judgement.out_of_range is None


WIDER = [
    {"accumulator": 2.0},
    {"prescales": "q"},
    {"prescales": "k"},
    {"ds_scaled": True},
    {"ds_roundings": 2},
    {"p_normalised": True},
    {"l_from": "rounded"},
    {"ds_from": "rounded"},
    {"group_sum": "dtype"},
]


@pytest.mark.parametrize("declared", WIDER, ids=str)
def test_a_declaration_widens_and_never_narrows(declared: dict[str, Any]) -> None:
    default, wide = judged(tensors()).bound, judged(tensors(), **declared).bound
    assert all((a >= b * (1 - 16 * M * EPS)).all() for a, b in zip(wide, default, strict=True))
    assert any((a > b * (1 + 1e3 * EPS)).any() for a, b in zip(wide, default, strict=True))


@pytest.mark.parametrize(
    ("in_dtype", "declared"),
    [("fp16", {"p_dtype": "fp32"}), ("fp32", {"l_order": "tile"})],
)
def test_a_declaration_of_care_narrows(in_dtype: str, declared: dict[str, Any]) -> None:
    inputs = tensors(in_dtype)
    default = judged(inputs, in_dtype=in_dtype).bound
    narrow = judged(inputs, in_dtype=in_dtype, **declared).bound
    assert all((a <= b).all() for a, b in zip(narrow, default, strict=True))
    assert (narrow.out < default.out).any()


def test_tf32_widens_fp32_alone() -> None:
    for in_dtype, wider in (("fp32", True), ("fp16", False), ("fp64", False)):
        inputs = tensors(in_dtype)
        ieee = judged(inputs, in_dtype=in_dtype).bound
        tf32 = judged(inputs, in_dtype=in_dtype, dots="tf32").bound
        assert all(bool((a > b).any()) == wider for a, b in zip(tf32, ieee, strict=True))


def test_the_cheap_spread_is_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = judged(tensors()).bound
    monkeypatch.setattr(error_model, "EXACT_SPREAD", 0)
    cheap = judged(tensors()).bound
    assert (cheap.out >= exact.out * (1 - 16 * N * EPS)).all()
    assert (cheap.out > exact.out).any()


def test_float64_counts_its_own_roundoff() -> None:
    c = constants("fp64", Numerics(ds_roundings=2))
    assert c.u_p == pytest.approx(2 * 2.0**-53, rel=2 * EPS, abs=0)
    assert c.u_cast == c.u_p
    assert c.times == 2


@pytest.mark.parametrize("in_dtype", DTYPES)
def test_the_largest_values_are_those_of_the_format(in_dtype: str) -> None:
    c = constants(in_dtype, Numerics())
    assert c.max_in == c.max_p == torch.finfo(DTYPES[in_dtype]).max
    assert c.max_acc == torch.finfo(torch.float32).max


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="in_dtype is 'fp8'"):
        judged(tensors(), in_dtype="fp8")


def rescales_of(levels: list[float], splits: int) -> float:
    """R of one row with tiles of equal scores, derived from the bound of lse."""
    k = torch.tensor(levels, dtype=torch.float64).repeat_interleave(16).view(1, 1, -1, 1)
    one, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros_like(k)
    keys = 16 * len(levels)

    def lse_bound(block_n: int) -> float:
        numerics = Numerics(block_n=block_n, splits=splits)
        judgement = judge(
            one, k, v, one, mask=Mask(), sm_scale=1.0, in_dtype="fp32", numerics=numerics
        )
        gamma = constants("fp32", numerics).gamma(float(keys) + 2 * (keys // block_n) + 4)
        return judgement.bound.lse.item() - gamma

    return (lse_bound(16) - lse_bound(keys)) * 2.0**22


@pytest.mark.parametrize(
    ("levels", "changes"),
    [
        ([0.0, 0.0, 0.0, 0.0], 3),  # ties: rounding decides whether each rescales
        ([3.0, 0.0, 0.0, 0.0], 3),  # from the right: two ties and the peak
        ([0.0, 1.0, 2.0, 3.0], 3),
        ([1.0, 2.0, 4.0, 3.0], 2),
        ([3.0, 4.0, 2.0, 1.0], 2),
        ([3.0, 0.0, 1.0, 2.0], 1),
    ],
)
def test_rescales_are_counted_from_either_end(levels: list[float], changes: int) -> None:
    assert rescales_of(levels, 1) == pytest.approx(changes, rel=1e-5)


@pytest.mark.parametrize(
    ("levels", "changes"),
    [
        ([0.0], 0),
        ([1.0, 0.0], 1),  # each may be a split of its own
        ([0.0, 1.0, 2.0, 3.0], 3),  # the combination of a split replaces a rescale
        ([3.0, 0.0, 1.0, 2.0], 3),  # the last three are a split: two changes and the combination
        ([2.0, 1.0, 0.0, 3.0], 3),
        ([9.0, 0.0, 1.0, 8.0, 0.0, 2.0], 3),
        ([9.0, 0.0, 1.0, 2.0, 0.0, 8.0], 4),
    ],
)
def test_rescales_of_a_split_row_are_those_of_its_worst_part_and_the_merge(
    levels: list[float], changes: int
) -> None:
    for splits in (2, 3, 100):
        assert rescales_of(levels, splits) == pytest.approx(changes, rel=1e-5, abs=1e-5)


def test_a_maximum_of_before_costs_longer_exponents_where_a_row_has_several_tiles() -> None:
    """The bound of lse has 3u r in E, u_log r = 4u r, and 4u r for the maximum."""
    one, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 32, 1)
    bounds = {}
    for threshold in (0, 8):
        for block_n in (16, 32):
            numerics = Numerics(block_n=block_n, rescale_threshold=threshold)
            judgement = judge(
                one, k, k, one, mask=Mask(), sm_scale=1.0, in_dtype="fp32", numerics=numerics
            )
            bounds[threshold, block_n] = judgement.bound.lse.item()
    assert bounds[8, 32] == bounds[0, 32]
    longer = bounds[8, 16] - bounds[0, 16]
    assert longer == pytest.approx(11 * 2.0**-24 * 8 * math.log(2), rel=1e-4)


def test_sums_relative_to_a_maximum_of_before_overflow_sooner() -> None:
    """Two keys with v = 1e37 share the weight of a row; in a tile of their own they fit."""
    one, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 17, 1)
    v = torch.zeros(1, 1, 17, 1).index_fill(2, torch.tensor([0, 16]), 1e37)
    for threshold, block_n, fits in ((0, 16, True), (8, 16, False), (8, 32, True)):
        numerics = Numerics(block_n=block_n, rescale_threshold=threshold)
        judgement = judge(
            one, k, v, 0 * one, mask=Mask(), sm_scale=1.0, in_dtype="fp32", numerics=numerics
        )
        told = judgement.out_of_range
        assert (told is None) == fits, told
        assert fits or "the sum of unnormalised P|v|" in told


def extremes(q: float, k: float, v: float, dout: float) -> list[torch.Tensor]:
    """Two rows and two keys. The second k and v have the opposite sign, so dS and dQ are not 0."""
    inputs = [torch.full((1, 1, 2, 16), x, dtype=torch.float64) for x in (q, k, v, dout)]
    inputs[1][:, :, 1] *= -1
    inputs[2][:, :, 1] *= -1
    return inputs


@pytest.mark.parametrize(
    ("in_dtype", "name", "values"),
    [
        ("bf16", "|q|.|k|", (3e19, 3e19, 0, 0)),
        ("bf16", "|dout|.|v|", (0, 0, 3e19, 3e19)),
        ("bf16", "sum_j |dS||K|", (0, 1e25, 1e15, 1)),
        ("bf16", "sum_i |dS||Q|", (1e25, 0, 1e15, 1)),
        ("bf16", "the sum of unnormalised P|v|", (0, 0, 3e38, 0)),
        ("fp16", "|dS| + its error", (0, 0, 100, 100)),
        ("fp16", "|dq| + bound", (0, 100, 40, 40)),
        ("fp16", "|dk| + bound", (100, 0, 40, 40)),
        ("fp16", "|dv| + bound", (0, 0, 0, 65504)),
        ("fp16", "|lse|", (100, 200, 0, 0)),
    ],
)
def test_each_range_condition_is_checked(
    in_dtype: str, name: str, values: tuple[float, float, float, float]
) -> None:
    judgement = judge(
        *extremes(*values), mask=Mask(), sm_scale=1.0, in_dtype=in_dtype, numerics=Numerics()
    )
    assert judgement.out_of_range is not None
    assert judgement.out_of_range.startswith(f"{name} reaches ")


def test_a_stored_output_that_may_round_to_infinity_is_out_of_range() -> None:
    inputs = extremes(0, 0, 65504, 0)
    inputs[2].abs_()
    judgement = judge(*inputs, mask=Mask(), sm_scale=1.0, in_dtype="fp16", numerics=Numerics())
    assert judgement.out_of_range is not None
    assert judgement.out_of_range.startswith("|out| + bound reaches ")


@pytest.mark.parametrize(
    ("name", "values"),
    [("|dq| + bound", (0, 2.558, 40, 40)), ("|dk| + bound", (2.558, 0, 40, 40))],
)
def test_a_stored_gradient_that_may_round_to_infinity_is_out_of_range(
    name: str, values: tuple[float, float, float, float]
) -> None:
    # The gradient is 25600 * 2.558 = 65484.8, an ulp of 32 below the smallest overflow.
    judgement = judge(
        *extremes(*values), mask=Mask(), sm_scale=1.0, in_dtype="fp16", numerics=Numerics()
    )
    assert judgement.out_of_range is not None
    assert judgement.out_of_range.startswith(f"{name} reaches ")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("|q|.|k|", (3e19, 3e19, 0, 0)),
        ("sum_j |dS||K|", (0, 1e25, 1e15, 1)),
        ("sum_i |dS||Q|", (1e25, 0, 1e15, 1)),
    ],
)
def test_a_sum_is_in_range_before_it_is_scaled(
    name: str, values: tuple[float, float, float, float]
) -> None:
    judgement = judge(
        *extremes(*values), mask=Mask(), sm_scale=1e-39, in_dtype="bf16", numerics=Numerics()
    )
    assert judgement.out_of_range is not None
    assert judgement.out_of_range.startswith(f"{name} reaches ")


def test_a_sum_reaches_as_far_as_its_terms_where_they_cancel() -> None:
    for name, values, flipped in (
        ("sum_j |dS||K|", (0, 1e25, 1e15, 1), (1, slice(None))),  # dS of two equal keys
        ("sum_i |dS||Q|", (1e25, 0, 1e15, 1), (3, 1)),  # dS of two equal rows
    ):
        inputs = extremes(*values)
        tensor, rows = flipped
        inputs[tensor][:, :, rows] = inputs[tensor][:, :, rows].abs() * (1 if tensor == 1 else -1)
        truth = torch_reference.attention(*inputs, mask=Mask(), sm_scale=1.0)
        assert not (truth.dq if tensor == 1 else truth.dk).any()
        judgement = judge(*inputs, mask=Mask(), sm_scale=1.0, in_dtype="bf16", numerics=Numerics())
        assert judgement.out_of_range is not None
        assert judgement.out_of_range.startswith(f"{name} reaches ")


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("group_sum", ["fp32", "dtype"])
def test_a_bound_that_is_not_finite_is_out_of_range_or_that_of_lse(
    group_sum: str, output: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "finish_keys" if output in ("dk", "dv") else "_finish_rows"
    honest = getattr(error_model, name)

    def spoiled(*arguments: Any) -> Any:
        finished = honest(*arguments)
        getattr(finished, f"bound_{output}").view(-1)[0] = value
        return finished

    monkeypatch.setattr(error_model, name, spoiled)
    judgement = judged(tensors(), rows=16, group_sum=group_sum)
    assert not getattr(judgement.bound, output).isfinite().all()
    if output == "lse":
        assert judgement.out_of_range is None
        assert not math.isfinite(judgement.largest_lse_bound)
    else:
        assert judgement.out_of_range is not None
        assert judgement.out_of_range.startswith(f"|{output}| + bound reaches ")


def test_the_largest_bound_of_lse_is_that_of_all_rows() -> None:
    judgement = judged(tensors(), rows=16)
    assert judgement.largest_lse_bound == judgement.bound.lse.max().item() > 0


def test_ordinary_inputs_are_in_range() -> None:
    for in_dtype in (*DTYPES, "fp64"):
        assert judged(tensors(in_dtype), in_dtype=in_dtype).out_of_range is None


def test_visible_nan_is_out_of_range() -> None:
    inputs = tensors()
    inputs[1][0, 0, 12] = math.nan
    assert judged(inputs).out_of_range is not None


def test_max_score_is_that_of_visible_pairs() -> None:
    q, k, *_ = inputs = tensors("fp64")
    seen = WINDOW.dense(B, H, M, N).expand(B, H, M, N)
    scores = (q @ k.repeat_interleave(H // Hk, 1).mT * SCALE).abs()
    assert scores[seen].max() < scores.max()
    got = judged(inputs, in_dtype="fp64").max_score
    assert got == pytest.approx(scores[seen].max().item(), rel=16 * EPS)


@pytest.mark.parametrize("sign", [1, -1])
def test_max_score_is_of_scores_of_either_sign(sign: int) -> None:
    inputs = extremes(2, sign, 1, 1)
    inputs[1][:, :, 1] = 0
    judgement = judge(*inputs, mask=Mask(), sm_scale=0.5, in_dtype="fp64", numerics=Numerics())
    assert judgement.max_score == 16


def test_terms_cover_the_outputs() -> None:
    inputs = tensors("fp64")
    terms = judged(inputs, in_dtype="fp64").terms
    for name, value, most in zip(
        OUTPUTS, torch_reference.attention(*inputs, mask=WINDOW, sm_scale=SCALE), terms, strict=True
    ):
        finite = value.isfinite()
        assert (value.abs() <= most * (1 + 16 * M * EPS))[finite].all(), name
    assert (terms.lse[exact_places(WINDOW)["lse"]] == 1).all()


def test_terms_are_the_outputs_where_every_sign_is_plus() -> None:
    inputs = [x.abs() for x in tensors("fp64")]
    want = torch_reference.attention(*inputs, mask=WINDOW, sm_scale=SCALE)
    terms = judged(inputs, in_dtype="fp64").terms
    for a, b in ((terms.out, want.out), (terms.dv, want.dv)):
        assert ((a - b).abs() <= 16 * M * EPS * b).all()


def test_terms_of_dq_and_dk_count_both_halves_of_ds() -> None:
    # With positive signs dS = p dP - p delta, so the terms are the sum of both halves.
    q, k, v, dout = (x.abs() for x in tensors("fp64"))
    truth = torch_reference.attention(q, k, v, dout, mask=Mask(), sm_scale=SCALE)
    terms = judged([q, k, v, dout], Mask(), in_dtype="fp64").terms
    k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    p = torch.exp(q @ k.mT * SCALE - truth.lse.unsqueeze(3))
    halves = SCALE * p * (dout @ v.mT + (dout * truth.out).sum(3, keepdim=True))
    dq, dk = halves @ k, (halves.mT @ q).view(B, Hk, -1, N, D).sum(2)
    for a, b in ((terms.dq, dq), (terms.dk, dk)):
        assert ((a - b).abs() <= 16 * M * EPS * b).all()


@pytest.mark.parametrize("sizes", [(0, M, N), (B, 0, N), (B, M, 0)])
def test_size_zero_is_exact(sizes: tuple[int, int, int]) -> None:
    b, m, n = sizes
    q, k, v, dout = tensors()
    judgement = judged([q[:b, :, :m], k[:b, :, :n], v[:b, :, :n], dout[:b, :, :m]], Mask())
    shapes = [(b, H, m, Dv), (b, H, m), (b, H, m, D), (b, Hk, n, D), (b, Hk, n, Dv)]
    assert [tuple(x.shape) for x in judgement.bound] == shapes
    assert all((x == 0).all() for x in judgement.bound)
    assert (judgement.terms.lse == 1).all()
    assert judgement.out_of_range is None
