"""Families of q, k, v that differ in their scores: saturation, shifts, ties and underflow.

Gaussian inputs do not detect half of the faults on record. Each docstring names the faults that the
family detects.
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
_TILE = 16  # keys of the narrowest tile
_TILES = 32  # the most steps of a rising maximum
# The end of the supported range is 1e5.
_LARGEST_SCORE = 9.9e4
_RISE = 110.0  # past the largest exponent of exp in float32, 88.7
_STEPS = (1.0, 4.0, 12.0, 30.0)
_TIE_SCORE = 16.0
_TIE_STEPS = 8
# The distances below a row's maximum of keys of tiny weight, 43 to 58 bits.
_LIGHT = (30.0, 40.0)
# The distances below a row's maximum at which exp becomes subnormal in the dtype, and then 0.
_UNDERFLOW = {
    "fp16": (8.0, 20.0),
    "bf16": (80.0, 110.0),
    "fp32": (80.0, 110.0),
    "fp64": (690.0, 760.0),
}


def times8(problem: Problem) -> Values:
    """Scores times 8: detects a missing rescale of the accumulator when the row maximum moves."""
    q = drawn_normal(problem, "q", 8.0)
    return Values(q, drawn_normal(problem, "k"), drawn_normal(problem, "v"))


def times40(problem: Problem) -> Values:
    """Scores times 40, one key has all the weight: detects exp overflow and lost gradients."""
    q = drawn_normal(problem, "q", 40.0)
    return Values(q, drawn_normal(problem, "k"), drawn_normal(problem, "v"))


def _shifted(problem: Problem, shift: float) -> Values:
    """Return scores of about ``shift``: channel 0 of q and k is constant, the rest adds N(0, 1).

    The factor is split evenly, so |q| = |k| = sqrt(|shift| / sm_scale) in channel 0. In fp16 the
    cast saturates them if sm_scale < 2e-5. The relative error of a row's P is then up to |shift| /
    1e6. A smaller v keeps the resulting bounds of dq and dk, which grow with |k| and |q|, in the
    range of fp16.
    """
    q0 = math.sqrt(abs(shift) / problem.scale)
    rest = min(1.0, 1.0 / math.sqrt(problem.scale * math.sqrt(problem.D)))
    q, k = drawn_normal(problem, "q", rest), drawn_normal(problem, "k", rest)
    q[..., 0] = q0
    k[..., 0] = math.copysign(q0, shift)
    small = problem.dtype == "fp16" and abs(shift) > 1e4
    return Values(q, k, drawn_normal(problem, "v", 2.0**-10 if small else 1.0))


def cosine(problem: Problem) -> Values:
    """Rows of q and k of length 1, as in cosine attention: detects a limit on the scale.

    ``sm_scale`` is drawn up to 128 with these rows, whose scores are cosines times the scale.
    """
    q, k, v = (drawn_normal(problem, tensor) for tensor in ("q", "k", "v"))
    return Values(_of_length_1(q), _of_length_1(k), v)


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    """Divide rows by their lengths, which every device adds up in the same order."""
    squares = x * x
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        pairs = squares[..., :half] + squares[..., half : 2 * half]
        squares = torch.cat([pairs, squares[..., 2 * half :]], -1)
    # The square root and the quotient of two tensors are rounded correctly on every device.
    return x / squares.clamp(min=2.0**-100).sqrt()


def swept_scores(problem: Problem) -> Values:
    """Scores of x and 0 in turn, where x sweeps the numbers of 16 bits: detects a gap of exp.

    Each row has its own x: finite fp16 numbers for fp16, and otherwise bf16 numbers, which have
    every exponent of float32, up to the end of the supported range. They ascend over all rows of a
    problem. Numbers are skipped at equal distances if there are fewer rows. v is 0 for the keys of
    score 0, so that out is as small as the weights of the others.
    """
    q, k, v = (drawn_normal(problem, tensor) for tensor in ("q", "k", "v"))
    odd = (places(problem, problem.D) & 1) == 1
    q.masked_fill_(odd, 0.0)
    k.masked_fill_(~odd, 0.0)
    q[..., 0] = _swept(problem, q.shape[:3])
    is_zero = (places(problem, problem.N) & 1) == 1
    k[..., 0] = (~is_zero).to(torch.float64)
    return Values(q, k, v.masked_fill_(is_zero.view(-1, 1), 0.0))


def _swept(problem: Problem, shape: torch.Size) -> torch.Tensor:
    """Return numbers of 16 bits in ascending order over a shape, those of each sign in turn."""
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    largest = min(torch.finfo(dtype).max, _LARGEST_SCORE / problem.scale)
    # The bits of a number that is not negative count those below it.
    count = 1 + int(torch.tensor(largest, dtype=dtype).view(torch.int16))
    # Rows are numbered in each problem of a batch.
    parts = len(problem.all_seeds)
    rows = shape.numel() // parts
    number = places(problem, rows).repeat(parts).view(shape)
    if 0 < rows < 2 * count:
        first = of_entries(problem, [seed % (2 * count // rows) for seed in problem.all_seeds])
        number = number * (2 * count) // rows + first.squeeze(3)
    number = number % (2 * count)
    size = (number % count).to(torch.int16).view(dtype).to(torch.float64)
    return torch.where(number < count, size, -size)


def lse_low_90(problem: Problem) -> Values:
    """LSE near -90: exp(score) without subtracting the maximum is subnormal or flushed to 0."""
    return _shifted(problem, -90.0)


def lse_low_130(problem: Problem) -> Values:
    """LSE near -130: exp(score) without subtracting the maximum is 0."""
    return _shifted(problem, -130.0)


def lse_low_6e3(problem: Problem) -> Values:
    """LSE near -6e3: detects a finite value used for -inf or as the first running maximum."""
    return _shifted(problem, -6e3)


def lse_low_1e5(problem: Problem) -> Values:
    """LSE near -9.9e4, the end of the supported range: detects -1e4 or -65504 used for -inf."""
    return _shifted(problem, -_LARGEST_SCORE)


def lse_high_6e4(problem: Problem) -> Values:
    """LSE near +6e4: detects an LSE in 16 bits, or exp(score - m) with m in another unit."""
    return _shifted(problem, 6e4)


def lse_high_1e5(problem: Problem) -> Values:
    """LSE near +9.9e4, the end of the supported range: as ``lse_high_6e4``, beyond fp16's range.

    The ulp of the scores is 2**-7 in fp32. P, which the backward recomputes from the stored LSE, is
    therefore wrong by a percent and must not be wrong by more.
    """
    return _shifted(problem, _LARGEST_SCORE)


def _levelled(problem: Problem, levels: torch.Tensor, *largest: float) -> Values:
    """Return scores equal to ``levels`` (B or 1, heads or 1, N) in every row, up to k's rounding.

    Channel 0 determines the scores. In the other channels q is nonzero in even and k in odd ones,
    so that they add nothing to a score although both vary. ``largest`` is about the largest
    |level|, one for all seeds or one for each; its square root scales q, and k is divided by it.
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
    """Scores of 16 plus a few ulps: detects a rescale that is skipped or not exactly 1.

    The ulps are those of the input dtype in even rows and of fp32 in odd rows. They rise in eight
    steps along the keys, so that the running maximum moves by very little. With one channel the 16
    is omitted.
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
    """Scores that rise with every 16 keys: detects a rescale that is missing, doubled or delayed.

    They rise by 1, 4, 12 or 30 per step, chosen by the seed, but to at most 110 in total. exp(12)
    exceeds the range of fp16, so P overflows in a kernel that rescales only after a larger rise.
    Steps of 4 add up past the range of exp in float32. A kernel that compares the maximum with that
    of the tile before, and not with the one in use, never rescales for them. There are at most 32
    steps: with more than 512 keys they are 32 keys wide, with more than 1,024 they are 64 wide.
    """
    width = _TILE
    while problem.N > width * _TILES:
        width *= 2
    tiles = max(1, -(-problem.N // width))
    steps = [min(_STEPS[seed % len(_STEPS)], _RISE / tiles) for seed in problem.all_seeds]
    tile = (places(problem, problem.N) // width).to(torch.float64)
    levels = tile * of_entries(problem, steps).squeeze(3)
    return _levelled(problem, levels, *(max(1.0, tiles * step) for step in steps))


def two_level(problem: Problem) -> Values:
    """Scores of 0 and -8, half of the keys each: a P with too few digits loses the lower half.

    All P of a level have the same rounding error, so the errors add up instead of averaging out.
    """
    heads = drawn_shape(problem, "k")[1]
    low = random_bits(problem, "two_level/low", (problem.B, heads, problem.N)) & 1
    return _levelled(problem, low.to(torch.float64) * -8.0, 8.0)


def p_underflow(problem: Problem) -> Values:
    """P subnormal or 0 except for one key in 16: detects flushing and double rounding of P.

    Away from the peaks, s - m is uniform in the range in which exp underflows in the dtype that P
    is cast to: fp16 [-20, -8], bf16 and fp32 [-110, -80], float64 [-760, -690].
    """
    near, far = _UNDERFLOW[problem.dtype]
    shape = (problem.B, drawn_shape(problem, "k")[1], problem.N)
    depth = drawn_uniform(problem, "p_underflow/depth", shape)
    among = min(_TILE, max(1, problem.N))
    peaks = of_entries(problem, [seed % among for seed in problem.all_seeds]).squeeze(3)
    peak = places(problem, problem.N) % _TILE == peaks
    return _levelled(problem, torch.where(peak, 0.0, depth * (near - far) - near), far)


def values_of_light_keys(problem: Problem) -> Values:
    """v = 0 on a third of the keys, which has all the weight: detects key tiles that are skipped.

    The scores of the other keys lie 30 to 40 below, more than 24 bits. out and the gradients come
    from these keys alone. The seed chooses the first or the last third, as tiles that follow the
    maximum are those that a kernel can skip.
    """
    shape = (problem.B, drawn_shape(problem, "k")[1], problem.N)
    depth = drawn_uniform(problem, "values_of_light_keys/depth", shape)
    near, far = _LIGHT
    from_end = of_entries(problem, [seed & 1 for seed in problem.all_seeds]).squeeze(3)
    place = places(problem, problem.N)
    place = torch.where(from_end == 1, problem.N - 1 - place, place)
    heavy = place <= problem.N // 3
    levels = torch.where(heavy, 0.0, depth * (near - far) - near)
    values = _levelled(problem, levels, far)
    return values._replace(v=torch.where(heavy.unsqueeze(3), 0.0, values.v))


def duplicated_keys(problem: Problem) -> Values:
    """Seven different keys in turn, each twice, with different values: ties for the maximum.

    The scores have a spread of 4, so a tied key that is lost changes much of the row's weight. The
    copies of a key lie in different tiles, at different places of the tile.
    """
    source = places(problem, problem.N) // 2 % 7
    k = drawn_normal(problem, "k").index_select(2, source)
    return Values(drawn_normal(problem, "q", 4.0), k, drawn_normal(problem, "v"))


def last_visible(problem: Problem) -> torch.Tensor:
    """Return the last visible key of every row, int64 (B, M); -1 in a row without one."""
    mask = problem.mask
    rows, keys = (x.view(-1, 1) for x in length_tensors(problem))
    m = places(problem, problem.M)
    position = m + keys - rows
    last = keys - 1 + 0 * m
    if mask.right is not None:
        last = torch.minimum(last, position + mask.right)
    # The window's left bound does not matter: it reaches back from a position, which never lies
    # past the last key.
    return torch.where((m < rows) & (last >= 0), last, -1)


def _needles(problem: Problem, hidden: bool) -> Values:
    """Give some rows a score of 20 with one target key: q = a d and k = c d, d = +-1 per channel.

    d belongs to the key, so that rows with the same target agree. |d|^2 = D exactly, so the score
    is 20 without computing a sum. a keeps the other scores of the row within N(0, 1).
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
    # An extra slot at index N receives the rows without a target.
    hit = torch.zeros(problem.B, problem.N + 1, dtype=torch.bool, device=problem.device)
    hit.scatter_(1, torch.where(target >= 0, target, problem.N), True)
    k = torch.where(hit[:, None, : problem.N, None], direction * c, k)
    return Values(q, k, v)


def needle_visible(problem: Problem) -> Values:
    """The last visible key of some rows has nearly all the weight: detects a mask too narrow."""
    return _needles(problem, hidden=False)


def needle_hidden(problem: Problem) -> Values:
    """The first key hidden on the right would have nearly all the weight: detects a mask too wide.

    Rows that hide no valid key on the right target their last visible key.
    """
    return _needles(problem, hidden=True)


SCORE_FAMILIES = (
    times8,
    times40,
    cosine,
    swept_scores,
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
    values_of_light_keys,
    duplicated_keys,
    needle_visible,
    needle_hidden,
)
