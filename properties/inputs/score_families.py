"""Families of q, k, v by their scores: where the softmax saturates, shifts, ties or underflows.

Gaussian inputs never show half of the faults on record, so each family says which fault it shows.
"""

from __future__ import annotations

import math

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.sampling import (
    TORCH_DTYPES,
    Values,
    drawn_normal,
    drawn_shape,
    drawn_uniform,
    length_tensors,
    of_entries,
    places,
    random_bits,
)

__all__ = ["SCORE_FAMILIES", "last_visible"]

_NEEDLE_SCORE = 20.0
_TILE = 16  # keys: the narrowest tile
_RISE = 64.0
_STEPS = (1.0, 4.0, 12.0, 30.0)
_TIE_SCORE = 16.0
_TIE_STEPS = 8
# How far below the row's maximum exp leaves the normal numbers of the dtype, and then all of them.
_UNDERFLOW = {
    "fp16": (8.0, 20.0),
    "bf16": (80.0, 110.0),
    "fp32": (80.0, 110.0),
    "fp64": (690.0, 760.0),
}


def times8(problem: Problem) -> Values:
    """Scores multiplied by 8: a missing rescale of the accumulator when the row maximum moves."""
    q = drawn_normal(problem, "q", 8.0)
    return Values(q, drawn_normal(problem, "k"), drawn_normal(problem, "v"))


def times40(problem: Problem) -> Values:
    """Scores multiplied by 40, one key takes all: exp overflow, saturated rows, lost gradients."""
    q = drawn_normal(problem, "q", 40.0)
    return Values(q, drawn_normal(problem, "k"), drawn_normal(problem, "v"))


def _shifted(problem: Problem, shift: float) -> Values:
    """Scores of about ``shift``: channel 0 of q and k is constant, the rest adds N(0, 1) at most.

    The factor is split evenly, so |q|, |k| = sqrt(|shift| / sm_scale); in fp16 the cast saturates
    them once sm_scale < 2e-5. The P of a row is then known to a part in 1e6 / |shift| at most, and
    what that allows dq and dk, times |k| and |q|, is kept in fp16's range by a smaller v.
    """
    q0 = math.sqrt(abs(shift) / problem.scale)
    rest = min(1.0, 1.0 / math.sqrt(problem.scale * math.sqrt(problem.D)))
    q, k = drawn_normal(problem, "q", rest), drawn_normal(problem, "k", rest)
    q[..., 0] = q0
    k[..., 0] = math.copysign(q0, shift)
    small = problem.dtype == "fp16" and abs(shift) > 1e4
    return Values(q, k, drawn_normal(problem, "v", 2.0**-10 if small else 1.0))


def lse_low_90(problem: Problem) -> Values:
    """LSE near -90: exp(score) without the maximum subtracted is subnormal, or flushed to 0."""
    return _shifted(problem, -90.0)


def lse_low_130(problem: Problem) -> Values:
    """LSE near -130: exp(score) without the maximum subtracted is 0 even as a subnormal."""
    return _shifted(problem, -130.0)


def lse_low_6e3(problem: Problem) -> Values:
    """LSE near -6e3: a finite stand-in for -inf, or a running maximum that starts too high."""
    return _shifted(problem, -6e3)


def lse_low_1e5(problem: Problem) -> Values:
    """LSE near -9.9e4, the least that is promised: a stand-in for -inf of -1e4 or -65504."""
    return _shifted(problem, -9.9e4)


def lse_high_6e4(problem: Problem) -> Values:
    """LSE near +6e4: an LSE kept in 16 bits, or exp(score - m) with m of another unit."""
    return _shifted(problem, 6e4)


def lse_high_1e5(problem: Problem) -> Values:
    """LSE near +9.9e4, the most that is promised: scores past fp16's largest number, and the same.

    The scores' ulp is 2**-7 in fp32, so the P that the backward recomputes from the stored LSE is
    off by a percent, and must not be off by more.
    """
    return _shifted(problem, 9.9e4)


def _levelled(problem: Problem, levels: torch.Tensor, *largest: float) -> Values:
    """Scores that are ``levels`` (B or 1, heads or 1, N) in every row, but for k's rounding.

    Channel 0 makes them. Otherwise q lives in the even channels and k in the odd ones, so that
    nothing else adds to a score although both vary. ``largest`` is about the largest |level|, one
    for all or one for each seed: its root goes to q, the other root to k.
    """
    q, k, v = (drawn_normal(problem, tensor) for tensor in ("q", "k", "v"))
    odd = (places(problem, problem.D) & 1) == 1
    q.masked_fill_(odd, 0.0)
    k.masked_fill_(~odd, 0.0)
    unit, shares = 1 / math.sqrt(problem.scale), [math.sqrt(x) for x in largest]
    q[..., 0] = of_entries(problem, [unit * share for share in shares]).squeeze(3)
    k[..., 0] = levels * of_entries(problem, [unit / share for share in shares]).squeeze(3)
    return Values(q, k, v)


def near_ties(problem: Problem) -> Values:
    """Scores that rise by an ulp or two, 16 + ulps: a rescale that is skipped, or not exactly 1.

    The ulps are those of the input dtype in even rows, those of fp32 in odd rows. They rise in
    eight steps along the keys, so the running maximum hardly moves, but does. (Of one channel, the
    16 is left out.)
    """
    base = torch.full((1, 1, 1), _TIE_SCORE, dtype=torch.float64, device=problem.device)
    q, k, v = _levelled(problem, base, _TIE_SCORE)
    coarse, fine = torch.finfo(TORCH_DTYPES[problem.dtype]).eps, torch.finfo(torch.float32).eps
    unit = 1 / math.sqrt(problem.scale)
    q[:, :, 0::2, -1] = unit * _TIE_SCORE * coarse
    q[:, :, 1::2, -1] = unit * _TIE_SCORE * fine
    rise = places(problem, problem.N) * _TIE_STEPS // max(1, problem.N)
    jitter = random_bits(problem, "near_ties/jitter", drawn_shape(problem, "k")[:3]) & 1
    k[..., -1] = (rise + jitter).to(torch.float64) * unit
    return Values(q, k, v)


def rising_max(problem: Problem) -> Values:
    """Scores that rise with every key tile of 16: a rescale that is missing, done twice or put off.

    By 1, 4, 12 or 30 a tile, as the seed says, or in equal steps to 64 where there are more tiles
    than that. exp(12) is past fp16: a kernel that rescales only after a larger rise overflows in P.
    """
    tiles = max(1, -(-problem.N // _TILE))
    steps = [min(_STEPS[seed % len(_STEPS)], _RISE / tiles) for seed in problem.all_seeds]
    tile = (places(problem, problem.N) // _TILE).to(torch.float64)
    levels = tile * of_entries(problem, steps).squeeze(3)
    return _levelled(problem, levels, *(max(1.0, tiles * step) for step in steps))


def two_level(problem: Problem) -> Values:
    """Scores of 0 and -8 alone, half the keys each: a P kept too coarsely loses the lower half.

    All P of a level are rounded alike, so their errors add up instead of averaging out.
    """
    heads = drawn_shape(problem, "k")[1]
    low = random_bits(problem, "two_level/low", (problem.B, heads, problem.N)) & 1
    return _levelled(problem, low.to(torch.float64) * -8.0, 8.0)


def p_underflow(problem: Problem) -> Values:
    """P in and below the subnormal numbers, but for one key in 16: flushes, and P rounded twice.

    Away from the peaks, s - m is even in the range over which exp leaves the dtype that P is cast
    to: fp16 [-20, -8], bf16 and fp32 [-110, -80], float64 [-760, -690].
    """
    near, far = _UNDERFLOW[problem.dtype]
    shape = (problem.B, drawn_shape(problem, "k")[1], problem.N)
    depth = drawn_uniform(problem, "p_underflow/depth", shape)
    among = min(_TILE, max(1, problem.N))
    peaks = of_entries(problem, [seed % among for seed in problem.all_seeds]).squeeze(3)
    peak = places(problem, problem.N) % _TILE == peaks
    return _levelled(problem, torch.where(peak, 0.0, depth * (near - far) - near), far)


def duplicated_keys(problem: Problem) -> Values:
    """Seven different keys in turn, each twice, with values of their own: ties for the maximum.

    A tied key that is lost or counted once takes much of the row's weight with it, because the
    scores are spread by 4; its copies stand in other tiles, at other places of the tile.
    """
    source = places(problem, problem.N) // 2 % 7
    k = drawn_normal(problem, "k").index_select(2, source)
    return Values(drawn_normal(problem, "q", 4.0), k, drawn_normal(problem, "v"))


def last_visible(problem: Problem) -> torch.Tensor:
    """The last visible key of every row, int64 (B, M); -1 in a row without one."""
    mask = problem.mask
    rows, keys = (x.view(-1, 1) for x in length_tensors(problem))
    m = places(problem, problem.M)
    position = m + keys - rows
    last = keys - 1 + 0 * m
    if mask.right is not None:
        last = torch.minimum(last, position + mask.right)
    # A window reaches back from a position, which never lies past the last key.
    return torch.where((m < rows) & (last >= 0), last, -1)


def _needles(problem: Problem, hidden: bool) -> Values:
    """Every few rows, q = a d and the key that the row aims at k = c d, with d = +-1 per channel.

    d belongs to the key, so rows that aim at one key agree; |d|^2 = D exactly, so no sum is needed
    to make the score 20. a keeps the row's other scores within N(0, 1).
    """
    q, k, v = (drawn_normal(problem, tensor) for tensor in ("q", "k", "v"))
    if 0 in (problem.B, problem.M, problem.N):
        return Values(q, k, v)
    rows, keys = (x.view(-1, 1) for x in length_tensors(problem))
    target = last_visible(problem)
    m = places(problem, problem.M)
    if hidden:
        target = torch.where((target + 1 < keys) & (m < rows), target + 1, target)
    stride = (rows // 4).clamp(min=1)
    seeds = of_entries(problem, problem.all_seeds).view(-1, 1)
    target = torch.where(m % stride == seeds % stride, target, -1)

    heads = 1 if q.shape[1] < problem.H else k.shape[1]
    bits = random_bits(
        problem, f"{problem.inputs}/direction", (problem.B, heads, problem.N, problem.D)
    )
    direction = ((bits & 1) * 2 - 1).to(torch.float64)
    a = min(1.0, 1.0 / (problem.scale * math.sqrt(problem.D)))
    c = _NEEDLE_SCORE / min(problem.scale * problem.D, math.sqrt(problem.D))

    aims = (target >= 0).view(problem.B, 1, problem.M, 1)
    index = target.clamp(min=0).view(problem.B, 1, problem.M, 1)
    aimed = direction.take_along_dim(index, dim=2)
    if heads > 1:
        aimed = aimed.repeat_interleave(problem.G, dim=1)
    q = torch.where(aims, aimed * a, q)
    # One slot more than keys takes the rows that aim at nothing.
    hit = torch.zeros(problem.B, problem.N + 1, dtype=torch.bool, device=problem.device)
    hit.scatter_(1, torch.where(target >= 0, target, problem.N), True)
    k = torch.where(hit[:, None, : problem.N, None], direction * c, k)
    return Values(q, k, v)


def needle_visible(problem: Problem) -> Values:
    """The last visible key of some rows has nearly all their weight: a mask one key too narrow."""
    return _needles(problem, hidden=False)


def needle_hidden(problem: Problem) -> Values:
    """The first key hidden on the right would take nearly all the weight: a mask too wide.

    Rows that hide no valid key on the right have the needle at their last visible key.
    """
    return _needles(problem, hidden=True)


SCORE_FAMILIES = (
    times8,
    times40,
    lse_low_90,
    lse_low_130,
    lse_low_6e3,
    lse_low_1e5,
    lse_high_6e4,
    lse_high_1e5,
    near_ties,
    rising_max,
    two_level,
    p_underflow,
    duplicated_keys,
    needle_visible,
    needle_hidden,
)
