"""Score modifications besides scaling and masking: softcap, ALiBi, bias.

``SCORE_MODS`` selects them, as a sum of the constants below. If it is 0, a kernel compiles none of
this code. Otherwise scores are in natural units, and ``base2_scale`` converts them to base 2.

Source: Press, Smith, Lewis 2022 (arXiv:2108.12409), ALiBi.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_kernels.kernels.common.softmax import LOG2E, scale_from_bits

__all__ = [
    "ALIBI",
    "BIAS",
    "SOFTCAP",
    "ScoreModArgs",
    "ScoreMods",
    "apply_score_mods",
    "base2_scale",
    "score_mods",
    "tanh_dtanh",
]

SOFTCAP: tl.constexpr = tl.constexpr(1)
ALIBI: tl.constexpr = tl.constexpr(2)
BIAS: tl.constexpr = tl.constexpr(4)


class ScoreModArgs(NamedTuple):
    """The arguments of a call's score modifications; placeholders for those not in SCORE_MODS."""

    softcap_bits: Any
    slopes_ptr: Any
    slopes_stride_entry: Any
    slopes_stride_head: Any
    bias: Any


class ScoreMods(NamedTuple):
    """The scales and score modifications of one head; placeholders for those not in SCORE_MODS.

    ``qk_scale`` converts scores to base 2, ``factor`` multiplies q.k before a softcap, and ``bias``
    points to the head's matrix.
    """

    qk_scale: Any
    factor: Any
    softcap: Any
    slope: Any
    bias: Any
    bias_stride_row: Any
    bias_stride_column: Any


@triton.jit
def base2_scale(sm_scale, ACC: tl.constexpr, SCORE_MODS: tl.constexpr):
    """Returns the scale that converts dots of q and k, or modified scores, to base 2."""
    if SCORE_MODS:
        scale = tl.full([], LOG2E, ACC)
    else:
        scale = (sm_scale * LOG2E).to(ACC)
    return scale


@triton.jit
def score_mods(args, sm_scale, qk_scale, b, h, ACC: tl.constexpr, SCORE_MODS: tl.constexpr):
    """Returns the ``ScoreMods`` of one head."""
    factor, softcap, slope = sm_scale, sm_scale, sm_scale
    if SOFTCAP & SCORE_MODS:
        softcap = scale_from_bits(args.softcap_bits)
        factor = sm_scale / softcap
    if ALIBI & SCORE_MODS:
        place = b.to(tl.int64) * args.slopes_stride_entry + h.to(tl.int64) * args.slopes_stride_head
        slope = tl.load(args.slopes_ptr + place)
    bias = args.bias.ptr
    if BIAS & SCORE_MODS:
        bias += b.to(tl.int64) * args.bias.stride_entry + h.to(tl.int64) * args.bias.stride_head
    return ScoreMods(
        qk_scale, factor.to(ACC), softcap.to(ACC), slope.to(ACC),
        bias, args.bias.stride_row, args.bias.stride_column,
    )  # fmt: skip


@triton.jit
def tanh_dtanh(x):
    """Returns (tanh x, 1 - tanh(x)^2), both with a relative error of a few roundings.

    For |x| >= 1/2 they are (1 - e) / (1 + e) and 4 e / (1 + e)^2 with e = exp(-2 |x|), which may be
    0. For smaller |x|, 1 - e cancels. There, tanh is seven steps of Lambert's continued fraction,
    written as a quotient of sums of positive terms. Its relative error at 1/2 is 2^-52.

    Source: Lambert 1761; the fraction is in Abramowitz and Stegun, 4.5.70.
    """
    size = tl.abs(x)
    # equivalent: Both formulas are as close to tanh at 1/2.
    is_small = size < 0.5
    e = tl.exp2(size * (-2.0 * LOG2E))
    square = x * x
    above = 135135.0 + square * (17325.0 + square * (378.0 + square))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    inverse = 1.0 / tl.where(is_small, below, 1.0 + e)
    tanh = tl.where(is_small, x * above, tl.where(x < 0, e - 1.0, 1.0 - e)) * inverse
    dtanh = tl.where(is_small, 1.0 - tanh * tanh, 4.0 * e * inverse * inverse)
    return tanh, dtanh


@triton.jit
def apply_score_mods(dots, offs_m, offs_n, mask, mods, SCORE_MODS: tl.constexpr):
    """Returns (scores in natural units, their derivative by the scaled dots) of a tile of dots.

    Offsets broadcast to the shape of ``dots``. Scores of padding are undefined.
    """
    scores = dots * mods.factor
    dtanh = 1.0
    if SOFTCAP & SCORE_MODS:
        tanh, dtanh = tanh_dtanh(scores)
        scores = tanh * mods.softcap
    if ALIBI & SCORE_MODS:
        distance = tl.abs(offs_n - (offs_m + (mask.seqlen_k - mask.seqlen_q)))
        scores -= mods.slope * distance.to(scores.dtype)
    if BIAS & SCORE_MODS:
        # The bias of padding may hold anything, NaN included: it is not read.
        inside = (offs_m < mask.seqlen_q) & (offs_n < mask.seqlen_k)
        rows = offs_m.to(tl.int64) * mods.bias_stride_row
        places = rows + offs_n.to(tl.int64) * mods.bias_stride_column
        scores += tl.load(mods.bias + places, mask=inside, other=0.0).to(scores.dtype)
    return scores, dtanh
