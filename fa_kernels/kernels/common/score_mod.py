"""What is done to scores beside scaling and masking them: softcap, ALiBi, a bias.

``MODS`` says which, as a sum of the constants below; 0 is none of them, and then nothing here is
compiled. The scores are then in natural units, and scaled to base 2 once, by what stands in place
of sm_scale * log2(e). ``score_args`` is what the host gives: the softcap's bits, slopes and their
two strides, the bias and its four. ``mods`` is what it is for one head: the factor on q.k, the
softcap, the slope, and the matrix of the bias with its two strides.

Source: Press, Smith, Lewis 2022 (arXiv:2108.12409), ALiBi.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.tiles import LOG2E, scale_from_bits

__all__ = ["ALIBI", "BIAS", "SOFTCAP", "base2_scale", "modified", "mods_of_head", "tanh_with_slope"]

SOFTCAP: tl.constexpr = tl.constexpr(1)
ALIBI: tl.constexpr = tl.constexpr(2)
BIAS: tl.constexpr = tl.constexpr(4)


@triton.jit
def base2_scale(sm_scale, ACC: tl.constexpr, MODS: tl.constexpr):
    """What brings scores to base 2: dots of q and k, or what is made of them."""
    if MODS:
        scale = tl.full([], LOG2E, ACC)
    else:
        scale = (sm_scale * LOG2E).to(ACC)
    return scale


@triton.jit
def mods_of_head(score_args, sm_scale, b, h, ACC: tl.constexpr, MODS: tl.constexpr):
    """What ``modified`` takes of one head; fillers for what is not in MODS."""
    factor, softcap, slope = sm_scale, sm_scale, sm_scale
    if SOFTCAP & MODS:
        softcap = scale_from_bits(score_args[0])
        factor = sm_scale / softcap
    if ALIBI & MODS:
        place = b.to(tl.int64) * score_args[2] + h.to(tl.int64) * score_args[3]
        slope = tl.load(score_args[1] + place)
    bias = score_args[4]
    if BIAS & MODS:
        bias += b.to(tl.int64) * score_args[5] + h.to(tl.int64) * score_args[6]
    return factor.to(ACC), softcap.to(ACC), slope.to(ACC), bias, score_args[7], score_args[8]


@triton.jit
def tanh_with_slope(x):
    """(tanh x, 1 - tanh(x)^2), both to a few roundings of themselves.

    Beyond 1/2 by e = exp(-2 |x|), which may be 0: (1 - e) / (1 + e) and 4 e / (1 + e)^2. Below,
    where 1 - e cancels, by seven steps of Lambert's continued fraction as a quotient of sums of
    positive terms: at 1/2 it is off by 2^-52 of tanh.

    Source: Lambert 1761; the fraction is in Abramowitz and Stegun, 4.5.70.
    """
    size = tl.abs(x)
    is_small = size < 0.5
    e = tl.exp2(size * (-2.0 * LOG2E))
    square = x * x
    above = 135135.0 + square * (17325.0 + square * (378.0 + square))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    inverse = 1.0 / tl.where(is_small, below, 1.0 + e)
    tanh = tl.where(is_small, x * above, tl.where(x < 0, e - 1.0, 1.0 - e)) * inverse
    slope = tl.where(is_small, 1.0 - tanh * tanh, 4.0 * e * inverse * inverse)
    return tanh, slope


@triton.jit
def modified(dots, offs_m, offs_n, view, mods, MODS: tl.constexpr):
    """(scores in natural units, their derivative by the scaled dots) of a tile of dots.

    Offsets broadcast against each other, and are shaped as ``dots`` is; scores of padding mean
    nothing.
    """
    scores = dots * mods[0]
    steep = 1.0
    if SOFTCAP & MODS:
        tanh, steep = tanh_with_slope(scores)
        scores = tanh * mods[1]
    if ALIBI & MODS:
        distance = tl.abs(offs_n - (offs_m + (view[1] - view[0])))
        scores -= mods[2] * distance.to(scores.dtype)
    if BIAS & MODS:
        # Of padding it is not read: whatever stands there need not even be a number.
        inside = (offs_m < view[0]) & (offs_n < view[1])
        places = offs_m.to(tl.int64) * mods[4] + offs_n.to(tl.int64) * mods[5]
        scores += tl.load(mods[3] + places, mask=inside, other=0.0).to(scores.dtype)
    return scores, steep
