"""The bound of attention to codes: two writings agree, and the replay is near the true values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds.in_numpy.quantised import bound_of_row
from fa_verify.oracles.bounds.quantised import (
    OutOfRangeError,
    Replayed,
    _dots,
    replayed_attention,
    replayed_forward,
)
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.in_torch import decoded, encoded
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.quantised_numerics import QuantisedNumerics
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.inputs.quantised import make_quantised, whole_scales

NUMERICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offset": {"p_offset": 8},
    "largest": {"p_offset": "largest"},
    "lazy": {"p_offset": 4, "rescale_threshold": 4.0},
    "lazy from the last": {"p_offset": 4, "rescale_threshold": 4.0, "key_order": "last"},
    "many pivots": {"rescale_threshold": 2.0, "qk_bits": 14, "block_n": 3},
    "e5m2": {"p_format": "e5m2", "p_offset": 8},
    "truncated": {"p_rounding": "truncate", "p_offset": 8},
    "rounded sum": {"l_from": "rounded", "key_order": "last"},
    "short QK": {"qk_bits": 14, "p_offset": 8},
    "short PV": {"pv_bits": 14, "pv_promotion": "row", "p_offset": 8},
    "short PV, by tile": {"pv_bits": 13, "pv_promotion": "tile"},
    "short PV, by step": {"pv_bits": 14, "pv_promotion": "step"},
    "sums in fp16": {"p_format": "fp16", "pv_bits": 11},
    "bf16": {"p_format": "bf16"},
}
_OF_SUBJECT = {"block_n": 16, "rescale_threshold": 0.0, "l_from": "unrounded"}
# A causal mask, lengths, scales of tokens, and heads in groups; integers; v in 16 bits.
PROBLEMS = (
    QuantisedProblem(
        attention=Problem(
            B=2, H=2, Hk=1, M=5, N=41, D=40, Dv=3, dtype="bf16", dirty="nan",
            mask=Mask(causal=True, seqlens_k=(41, 19)),
        ),
        qk_scales="token", v_scales="channel",
    ),
    QuantisedProblem(
        attention=Problem(H=2, Hk=2, M=4, N=37, D=33, Dv=4, dtype="fp16", seed=3),
        qk="int8", v="input", qk_scales="block", blocks=(2, 8),
    ),
    QuantisedProblem(
        attention=Problem(B=2, M=3, N=40, D=8, Dv=2, dtype="bf16", seed=5),
        qk="e5m2", v="e5m2", qk_scales="head", v_scales="head", codes="peaked",
    ),
)  # fmt: skip


def _judged(problem: QuantisedProblem, words: dict[str, Any]) -> tuple[dict[str, Any], Replayed]:
    """Return the numbers of a problem with its scales, and its replay."""
    a, x = problem.attention, make_quantised(problem)
    scales = whole_scales(problem, x)
    forms = (problem.qk, problem.qk, problem.v)
    q, k, v = (
        decoded(t, FORMATS[form]) if form in FORMATS else t.double()
        for t, form in zip(x[:3], forms, strict=True)
    )
    seen = a.mask.dense(a.B, a.H, a.M, a.N).expand(a.B, a.H, a.M, a.N)
    of_subject = {name: words.get(name, value) for name, value in _OF_SUBJECT.items()}
    numerics = QuantisedNumerics(**{x: y for x, y in words.items() if x not in _OF_SUBJECT})
    known = {
        **of_subject, "numerics": numerics, "out_dtype": a.dtype, "is_integer": problem.qk == "int8"
    }  # fmt: skip
    found = replayed_attention(q, k, v, *scales, seen, sm_scale=a.scale, **known)
    return {"q": q, "k": k, "v": v, "scales": scales, "seen": seen, "known": known}, found


@pytest.mark.parametrize("words", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=("e4m3fn", "int8", "e5m2"))
def test_two_writings_of_the_bound_agree(problem, words):
    try:
        given, found = _judged(problem, words)
    except OutOfRangeError:
        assert words.get("pv_bits") == 11  # e5m2 reaches 57344
        return
    a, (of_q, of_k, of_v) = problem.attention, given["scales"]
    for b in range(a.B):
        for h in range(a.H):
            g = h * a.Hk // a.H
            key = given["seen"][b, h].any(0)
            for m in range(a.M):
                seen = given["seen"][b, h, m]
                row = bound_of_row(
                    given["q"][b, h, m].numpy(),
                    given["k"][b, g].masked_fill(~key[:, None], 0.0).numpy(),
                    given["v"][b, g].masked_fill(~key[:, None], 0.0).numpy(),
                    torch.where(seen, of_q[b, h, m] * of_k[b, g] * a.scale, 1.0).numpy(),
                    of_v[b, g].numpy(),
                    seen.numpy(),
                    **given["known"],
                )
                bound = found.out_bound[b, h, m].numpy()
                assert np.allclose(row.out_bound, bound, rtol=1e-6, atol=0)
                assert (np.abs(row.out - found.out[b, h, m].numpy()) <= 1e-6 * bound).all()
                assert math.isclose(row.lse_bound, found.lse_bound[b, h, m], rel_tol=1e-6)
                if row.lse > -math.inf:
                    assert abs(row.lse - found.lse[b, h, m]) <= 1e-6 * row.lse_bound
                else:
                    assert found.lse[b, h, m] == -math.inf


@pytest.mark.parametrize("words", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=("e4m3fn", "int8", "e5m2"))
def test_the_replay_is_within_half_a_spacing_of_each_weight_of_the_true_values(problem, words):
    try:
        given, found = _judged(problem, words)
    except OutOfRangeError:
        return
    a, (of_q, of_k, of_v) = problem.attention, given["scales"]
    q, k, v = (
        torch.nan_to_num(x * scale)
        for x, scale in (
            (given["q"], of_q[..., None]), (given["k"], of_k[..., None]),
            (given["v"], of_v[:, :, None]),
        )
    )  # fmt: skip
    dout = torch.zeros((a.B, a.H, a.M, a.Dv))
    want = torch_reference.attention(q, k, v, dout, mask=a.mask, sm_scale=a.scale)
    size = torch_reference.attention(q, k, v.abs(), dout, mask=a.mask, sm_scale=a.scale).out
    numerics = given["known"]["numerics"]
    # A spacing covers truncation. The maximum in use has the offset in the range of P.
    form = FORMATS.get(numerics.p_format)
    relative = 2.0**-2 if form is None or form.mantissa == 2 else 2.0**-3
    least = 0.0 if form is None else form.spacing * 2.0**-numerics.offset
    width = relative * size + least * v.abs().sum(2).repeat_interleave(a.H // a.Hk, 1)[:, :, None]
    assert ((found.out - want.out).abs() <= width + found.out_bound).all()
    seen = want.lse > -math.inf
    room = found.lse_bound + (relative if given["known"]["l_from"] == "rounded" else 0.0)
    assert ((found.lse - want.lse).abs() <= room)[seen].all()
    assert (found.lse[~seen] == -math.inf).all()


def test_the_replay_of_a_cast_is_narrower_than_half_a_spacing():
    """The point of a replay: the median bound of e4m3 is a few roundings of out."""
    found = _judged(PROBLEMS[0], {"p_offset": 8})[1]
    seen = found.lse > -math.inf
    share = (found.out_bound / found.out.abs())[seen]
    assert share.median() < 0.02
    assert found.ambiguous < 0.01


def test_more_pivots_than_are_replayed_give_the_wide_bound():
    words = NUMERICS["many pivots"]
    narrow, wide = (_judged(PROBLEMS[0], x)[1] for x in ({}, words))
    assert wide.wide >= 0
    assert wide.out_bound.sum() > narrow.out_bound.sum()


# Scores in powers of two, by tiles of 4 keys: maxima 3, 7 and 7.5. The second is 4 above the first.
UNDECIDED = torch.tensor([[4, 9, 12, 6, 28, 22, 18, 26, 30, 24, 20, 22.0]], dtype=torch.float64)


def _lazy(threshold: float, v: torch.Tensor, offset: int = 4) -> torch.Tensor:
    """Return out of a forward in float64 that rescales above a threshold, and casts P."""
    form = FORMATS["e4m3fn"]
    t = UNDECIDED[0] / 4
    m, total, acc = -math.inf, 0.0, torch.zeros(v.shape[1], dtype=torch.float64)
    for start in range(0, len(t), 4):
        here = t[start : start + 4]
        if float(here.max()) - m > threshold:
            new = float(here.max())
            total, acc, m = total * 2.0 ** (m - new), acc * 2.0 ** (m - new), new
        p = torch.exp2(here - m + offset)
        total += float(p.sum())
        acc = acc + decoded(encoded(p, form), form) @ v[start : start + 4]
    return acc / total


def _lazy_bound(threshold: float, v: torch.Tensor) -> Replayed:
    return replayed_forward(
        torch.ones((1, 1), dtype=torch.float64), UNDECIDED.T, v,
        torch.full((1, 12), math.log(2) / 4, dtype=torch.float64), torch.ones(v.shape[1]).double(),
        torch.ones((1, 12), dtype=torch.bool), out_dtype="fp16", is_integer=False, block_n=4,
        rescale_threshold=threshold, l_from="unrounded", numerics=QuantisedNumerics(p_offset=4),
    )  # fmt: skip


def test_both_branches_of_a_rescale_that_is_undecided_are_inside():
    v = torch.tensor([[(7 * n + 3 * d) % 11 - 5 for d in range(5)] for n in range(12)]).double()
    rescaled, put_off = _lazy(4 - 1e-9, v), _lazy(4 + 1e-9, v)
    both = _lazy_bound(4.0, v)
    for out in (rescaled, put_off):
        assert ((out - both.out[0]).abs() <= both.out_bound[0]).all()
    # Where the threshold decides, there is one branch, and the other leaves its bound.
    for threshold, inside, outside in ((3.9, rescaled, put_off), (4.1, put_off, rescaled)):
        one = _lazy_bound(threshold, v)
        assert ((inside - one.out[0]).abs() <= one.out_bound[0]).all()
        assert ((outside - one.out[0]).abs() > one.out_bound[0]).any()


def test_a_truncating_sum_errs_toward_0():
    """Addends of one sign err to one side: the interval of 64 + 2**-8 ends below the sum."""
    q, k = torch.tensor([[8.0, 1.0]]).double(), torch.tensor([[8.0, 2.0**-8]]).double()
    low, high = _dots(q, k, 14, is_integer=False)
    exact = float(q @ k.mT)
    assert float(low) <= 64 <= float(high) == exact
    low, high = _dots(-q, k, 14, is_integer=False)
    assert -exact == float(low) <= -64 <= float(high)


# Products of one large and one small number, as an H200 adds them: the codes of the large product,
# and the exponent of the largest small one that it loses.
LOST = {"256 * 2**-9": (256.0, 2.0**-9, -12), "2**-9 * 256": (2.0**-9, 256.0, -12),
        "64 * 2**-7": (64.0, 2.0**-7, -14)}  # fmt: skip


@pytest.mark.parametrize(("left", "right", "exponent"), LOST.values(), ids=LOST)
def test_a_product_of_a_subnormal_code_may_lose_what_an_h200_loses(left, right, exponent):
    q = torch.tensor([[left, 2.0**-5]], dtype=torch.float64)
    k = torch.tensor([[right, 2.0 ** (exponent + 5)]], dtype=torch.float64)
    low, high = _dots(q, k, 14, False)
    assert float(low) <= 0.5
    assert float(high) >= 0.5 + 2.0**exponent
    # Normal numbers keep it.
    q[0, 0], k[0, 0] = 1.0, 0.5
    assert exponent == -14 or float(_dots(q, k, 14, False)[0]) > 0.5
