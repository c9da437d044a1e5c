"""The error bound of out and lse, for one chunk of rows.

Axes: z is batch entry and key/value head, r a row of any of the group's query heads, n a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from fa_verify.oracles.bounds.constants import Constants
from fa_verify.oracles.bounds.softcap import cap_error
from fa_verify.oracles.outputs import Numerics

__all__ = [
    "Chunk",
    "Forward",
    "Logits",
    "Scores",
    "Sink",
    "add_of_operands",
    "added_up",
    "forward_error",
    "joined",
    "live_tiles",
    "logits",
    "put_off",
    "scored",
    "softmax_additions",
]

_GAPS = 2**21  # elements of |v - out| in memory at a time, on a CPU: they fit its cache
_GAPS_CUDA = 2**24
_STARTS = 2**16  # elements of the tiles after several starts in memory at a time, on a CPU
_STARTS_CUDA = 2**22


class _Inputs(NamedTuple):
    """The fields of ``Chunk``."""

    q: torch.Tensor  # (Z, R, D)
    k: torch.Tensor  # (Z, N, D)
    v: torch.Tensor  # (Z, N, Dv)
    dout: torch.Tensor  # (Z, R, Dv)
    stored_dout: torch.Tensor  # (Z, R, Dv): dout as delta reads it, not converted for a dot
    dlse: torch.Tensor | None  # (Z, R): the gradient of lse, None if the kernel got none
    seen: torch.Tensor  # bool (Z, R, N)
    hidden: torch.Tensor  # its complement
    empty: torch.Tensor  # bool (Z, R): rows with no visible key
    query_tiles: torch.Tensor  # (Z, N): tiles of rows that see the key, over the group's heads
    added: tuple[torch.Tensor, ...]  # (Z, R, N) each: terms added to scores, 0 on hidden pairs
    any_order: bool  # whether a kernel may visit the key tiles of a row in any order
    one_head: bool  # whether the rows are those of one query head
    sink: torch.Tensor | None = None  # (Z, R): the row's sink, -inf without one; None without any
    around: tuple[int, int] = (0, 0)  # keys before and after the N here; no row sees them


class Chunk(_Inputs):
    """Float64 inputs of a chunk; rows and keys without a visible pair are 0.

    Keys that no row sees may be left out, as far as tiles and segments are as with them.
    """

    @property
    def keys(self) -> slice:
        """Returns the range of the problem's keys that are here."""
        return slice(self.around[0], self.around[0] + self.seen.shape[2])

    @cached_property
    def abs_q(self) -> torch.Tensor:
        """Returns |q|, like the next three computed once."""
        return self.q.abs()

    @cached_property
    def abs_k(self) -> torch.Tensor:
        """Returns |k|."""
        return self.k.abs()

    @cached_property
    def abs_v(self) -> torch.Tensor:
        """Returns |v|."""
        return self.v.abs()

    @cached_property
    def abs_dout(self) -> torch.Tensor:
        """Returns |dout|."""
        return self.dout.abs()

    @property
    def sink_there(self) -> torch.Tensor:
        """Returns 1 in rows with a sink and 0 in others, float64 (Z, R)."""
        if self.sink is None:
            return self.empty.new_zeros(self.empty.shape, dtype=torch.float64)
        return (self.sink > -math.inf).to(torch.float64)

    @property
    def blank(self) -> torch.Tensor:
        """Returns the rows with neither a visible key nor a sink, bool (Z, R)."""
        return self.empty if self.sink is None else self.empty & (self.sink == -math.inf)


def added_up(
    total: torch.Tensor | None, part: torch.Tensor, axis: int, around: tuple[int, int]
) -> torch.Tensor:
    """Returns a sum of earlier chunks and of another; ``total`` is changed, or None at first.

    Args:
        total: The sum of earlier chunks, with all keys.
        part: The chunk's contribution, with its keys.
        axis: The axis of the keys.
        around: Keys before and after those of the chunk.
    """
    if total is None:
        return pad(part, (0, 0) * (part.ndim - axis - 1) + around) if any(around) else part
    total.narrow(axis, around[0], part.shape[axis]).add_(part)
    return total


def joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Returns parts that follow each other along an axis; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], axis)


class Logits(NamedTuple):
    """The scores of a chunk, (Z, R, N), before a softmax; s and reach are 0 on hidden pairs."""

    s: torch.Tensor
    reach: torch.Tensor  # |q|.|k|, unscaled
    error: torch.Tensor  # the error of dots, prescaling, softcap and added terms, without 5u |s|
    slope: torch.Tensor | None  # ds / d(sm_scale q.k); None if it is 1 everywhere
    slope_error: torch.Tensor | None  # the largest error of a kernel's slope
    size: torch.Tensor  # |s|
    parts: torch.Tensor  # |s|, or the sum of its |terms|


class Sink(NamedTuple):
    """The weight of each row's sink and the error of its exponent, (Z, R); 0 in other rows."""

    p: torch.Tensor
    error: torch.Tensor


class Scores(NamedTuple):
    """The softmax of a chunk and the error of its scores; 0 on hidden pairs."""

    s: torch.Tensor  # (Z, R, N)
    reach: torch.Tensor  # |q|.|k|, unscaled
    p: torch.Tensor
    error: torch.Tensor  # E
    rescales: torch.Tensor  # their number, (Z, R, 1), or that of pairs where tiles have any order
    m: torch.Tensor  # (Z, R), 0 on blank rows, like lse and log_l; sinks count
    lse: torch.Tensor
    log_l: torch.Tensor
    lag: torch.Tensor  # r: the largest distance of the maximum in use below m
    tiles: torch.Tensor  # T: key tiles with a visible key, float64
    visits: torch.Tensor  # T, and 1 for a sink
    slope: torch.Tensor | None  # (Z, R, N): of s by sm_scale q.k; None if it is 1 everywhere
    slope_error: torch.Tensor | None  # the largest error of a kernel's slope
    size: torch.Tensor  # |s|
    parts: torch.Tensor  # |s|, or the sum of its |terms|
    sink: Sink | None  # None if no row has one


class Forward(NamedTuple):
    """True values, sums of |terms| and bounds of the forward pass; empty rows are not exempt."""

    scores: Scores
    out: torch.Tensor  # (Z, R, Dv)
    out_terms: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor  # (Z, R)


def _changes(
    tile_max: torch.Tensor, live_tiles: torch.Tensor, slack: torch.Tensor, starts: int
) -> torch.Tensor:
    """Returns the most possible changes of the running maximum after the first live tile.

    The tiles are visited in order. The visit starts at any of the first ``starts`` tiles.
    """
    tiles = tile_max.shape[2]
    limit = _STARTS_CUDA if tile_max.is_cuda else _STARTS
    together = max(1, limit // max(1, tile_max.numel()))
    most = []
    for first in range(0, starts, together):
        count = min(together, starts - first)
        after = tile_max[:, :, None, first:].expand(-1, -1, count, -1)
        live = live_tiles[:, :, None, first:]
        if count > 1:
            left_out = after.new_ones((count, tiles - first), dtype=torch.bool).tril_(-1)
            after, live = after.masked_fill(left_out, -math.inf), live & ~left_out
        earlier = pad(after.cummax(3).values[..., :-1], (1, 0), value=-math.inf)
        risen = live & (tile_max[:, :, None, first:] >= earlier.sub_(slack[:, :, None, None]))
        most.append(risen.sum(3).amax(2))
    return reduce(torch.maximum, most) - 1


def _rescales(
    tile_max: torch.Tensor, live_tiles: torch.Tensor, slack: torch.Tensor, splits: int
) -> torch.Tensor:
    """Returns R, the most changes of the running maximum, from either end of the row.

    A split can start at any tile, and combining it is one more change. As a split lacks at least
    one tile, the changes stay fewer than the tiles. Joining splits from the first to the last has
    no more: a later split with a larger maximum has a tile that is counted from any start.
    """
    if tile_max.shape[2] == 1:
        return torch.zeros_like(slack)
    either_end = ((tile_max, live_tiles), (tile_max.flip(2), live_tiles.flip(2)))
    starts = tile_max.shape[2] if splits > 1 else 1
    most = torch.maximum(*(_changes(*from_end, slack, starts) for from_end in either_end))
    if splits > 1:
        most = torch.minimum(most + 1, live_tiles.sum(2) - 1)
    return most.to(torch.float64)


def _tiles_above(
    tile_max: torch.Tensor, live_tiles: torch.Tensor, slack: torch.Tensor
) -> torch.Tensor:
    """Returns the most rescales after each tile, (Z, R, tiles), for any order of the tiles.

    Once a tile is visited, the running maximum is at least the tile's maximum. It then changes only
    at tiles with a larger maximum, so the number of other tiles whose maximum may be larger bounds
    the rescales of the tile's keys. The ascending order attains the bound for every tile at once.

    Splits and wider tiles need no further count. The combination of a split rescales its keys only
    if a tile of another split has a larger maximum. A wider tile with a larger maximum contains a
    tile with a larger maximum.
    """
    ascending = tile_max.masked_fill(~live_tiles, -math.inf).sort(2).values
    below = torch.searchsorted(ascending, (tile_max - slack.unsqueeze(2)).contiguous())
    above = tile_max.shape[2] - below - 1
    return above.masked_fill_(~live_tiles, 0).to(torch.float64)


def add_of_operands(
    error: torch.Tensor, a: torch.Tensor, b: torch.Tensor, eta: float
) -> torch.Tensor:
    """Adds the error of subnormal operands to that of the dots of two sets of rows, in place.

    It is eta (sum |a| + sum |b|), or 0 where either sum is 0: a product with 0 is exact.

    Args:
        error: (Z, R, N).
        a: (Z, R, D), absolute values.
        b: (Z, N, D), absolute values.
        eta: The error of an operand, per unit of the other one.
    """
    if not eta:
        return error
    of_a, of_b = a.sum(2, keepdim=True), b.sum(2, keepdim=True)
    there_a, there_b = (x.sign() for x in (of_a, of_b))
    # A product of two columns by two rows, which takes one pass over the pairs.
    left, right = torch.cat([of_a, there_a], 2), torch.cat([there_b, of_b], 2)
    return error.baddbmm_(left, right.mT, alpha=eta)


def _dot_error(
    x: Chunk, reach: torch.Tensor, t: float, c: Constants, prescales: str
) -> torch.Tensor:
    """Returns the error of the dots of q and k, times t, on all pairs; ``reach`` is |q|.|k|."""
    per_reach = c.short_dot(x.q.shape[2]) + 5 * c.u * c.u_dot
    if prescales != "none":
        per_reach += c.u_in if prescales != "qk" else 2 * c.u_in + c.u_in**2
    error = add_of_operands(reach * (t * per_reach), x.abs_q, x.abs_k, t * c.eta_dot)
    if prescales in ("q", "qk"):
        error += c.eta_prescaled(prescales, t) * x.abs_k.sum(2).unsqueeze(1)
    if prescales in ("k", "qk"):
        error += c.eta_prescaled(prescales, t) * x.abs_q.sum(2).unsqueeze(2)
    return error


def logits(
    x: Chunk, sm_scale: float, c: Constants, numerics: Numerics, softcap: float | None
) -> Logits:
    """Returns the scores of a chunk and the error of their dots, softcap and added terms."""
    s = ((x.q * sm_scale) @ x.k.mT).masked_fill_(x.hidden, 0.0)
    reach = (x.abs_q @ x.abs_k.mT).masked_fill_(x.hidden, 0.0)
    error = _dot_error(x, reach, sm_scale, c, numerics.prescales)
    slope, slope_error = None, None
    if softcap is not None:
        s, error, slope, slope_error = cap_error(s, error, softcap, c, numerics.softcap_slope)
    size = parts = s.abs()
    if x.added:
        s, parts = sum(x.added, s), sum(map(torch.abs, x.added), parts)
        size = s.abs()
        error = error + (3 + len(x.added)) * c.u * parts
    return Logits(s, reach, error, slope, slope_error, size, parts)


def live_tiles(x: Chunk, block_n: int) -> torch.Tensor:
    """Returns the key tiles with a visible key of each row, bool (Z, R, tiles)."""
    short = -x.seen.shape[2] % block_n
    return pad(x.seen, (0, short)).view(*x.seen.shape[:2], -1, block_n).any(3)


def put_off(tiles: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """Returns r, the largest distance of the maximum in use below the row's, of rows of tiles."""
    if not numerics.rescale_threshold:
        return torch.zeros_like(tiles)
    return numerics.rescale_threshold * math.log(2) * (tiles > 1).to(tiles.dtype)


def scored(
    x: Chunk, sm_scale: float, c: Constants, numerics: Numerics, softcap: float | None
) -> Scores:
    """Returns the softmax of a chunk and the error E of its scores::

        E = (g + ud) A0 + 5u |s| + 3u (|s - m| + r) + (1 + R) u_exp

    Subnormal operands add t eta_x (sum |q| + sum |k|) on tensor cores. A softcap contracts
    the terms before 5u |s| and adds its own roundings; see ``cap_error``. If n terms are added to
    x, they add (3 + n) u (|x| + the sum of |terms|): each term is a product of two rounded numbers,
    or x scaled, and every sum rounds it again.

    r is the largest distance of the maximum in use below the row's maximum. It is 0 if all keys of
    the row are in one tile, else the declared ``rescale_threshold``.

    R is the largest number of rescales, counted from the data. It is at most the number of tiles
    and usually far smaller, which keeps the bound sharp for long rows. Without a predicate, kernels
    visit the tiles of a row from either end. With one, they may visit the edge tiles first; R then
    holds for any order, and is counted for each key.

    A sink is known exactly, which leaves 5u |s| + 3u (|s - m| + r) + (1 + T) u_exp of E. A kernel
    takes it first or last, or in any split, which is one more rescale of the keys at most.
    """
    # 1. Scores and their reach |q|.|k|.
    s, reach, error, slope, slope_error, size, parts = logits(x, sm_scale, c, numerics, softcap)
    # 2. Maxima of tiles and rows: -inf for a hidden tile, 0 for an empty row.
    short = -s.shape[2] % numerics.block_n
    tiled = (*s.shape[:2], -1, numerics.block_n)
    visible_s = torch.where(x.hidden, -math.inf, s)
    whole_tiles = pad(visible_s, (0, short), value=-math.inf) if short else visible_s
    tile_max = whole_tiles.view(tiled).amax(3)
    live = live_tiles(x, numerics.block_n)
    m = tile_max.amax(2)
    if x.sink is not None:
        m = torch.maximum(m, x.sink)
    m = m.masked_fill_(x.blank, 0.0)
    # 3. Softmax.
    p = (visible_s - m.unsqueeze(2)).exp_()
    l_sum = p.sum(2)
    if x.sink is not None:
        p_sink = (x.sink - m).exp_()
        l_sum += p_sink
    l_sum.masked_fill_(x.blank, 1.0)
    p /= l_sum.unsqueeze(2)
    log_l = l_sum.log()
    # 4. The scores' error, including the changes of the running maximum.
    tiles = live.sum(2, dtype=torch.float64)
    visits = tiles if x.sink is None else tiles + x.sink_there
    lag = put_off(visits, numerics)
    of_rows = (3 * c.u * (m + lag) + c.u_exp).unsqueeze(2)
    # No visible score exceeds m: |s - m| is m - s.
    error.add_(size, alpha=5 * c.u).sub_(s, alpha=3 * c.u).add_(of_rows)
    error.masked_fill_(x.hidden, 0.0)
    largest, sink = error.amax(2), None
    if x.sink is not None:
        p_sink /= l_sum
        error_sink = 5 * c.u * x.sink.abs() + 3 * c.u * ((x.sink - m).abs() + lag) + c.u_exp
        # A sink that far below the maximum weighs nothing in a kernel either.
        error_sink.masked_fill_(p_sink == 0, 0.0)
        largest = torch.maximum(largest, error_sink)
        sink = Sink(p_sink, error_sink + x.sink_there * tiles * c.u_exp)
    slack = 2 * largest
    if x.any_order:
        above = _tiles_above(tile_max, live, slack)
        changes = above.repeat_interleave(numerics.block_n, dim=2)[:, :, : s.shape[2]]
    else:
        changes = _rescales(tile_max, live, slack, numerics.splits).unsqueeze(2)
    if x.sink is not None:
        changes = changes + x.sink_there.unsqueeze(2)
    error.add_(changes, alpha=c.u_exp).masked_fill_(x.hidden, 0.0)
    return Scores(
        s, reach, p, error, changes, m, m + log_l, log_l, lag, tiles, visits, slope, slope_error,
        size, parts, sink,
    )  # fmt: skip


def _spread(weights: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns sum_n weights |v - out|."""
    Z, R, N = weights.shape
    most = _GAPS_CUDA if v.is_cuda else _GAPS
    height = max(1, most // (Z * N * v.shape[2]))
    parts = []
    for start in range(0, R, height):
        here = slice(start, start + height)
        gaps = (v.unsqueeze(1) - out[:, here].unsqueeze(2)).abs_()
        parts.append((weights[:, here].unsqueeze(2) @ gaps).squeeze(2))
    return joined(parts, 1)


def softmax_additions(x: Chunk, scores: Scores, numerics: Numerics) -> torch.Tensor:
    """Returns the roundings of the softmax sum of each row, (Z, R)."""
    if numerics.l_order == "tile":
        widest = max(numerics.block_n, numerics.l_tile)
        added = x.seen.sum(2, dtype=torch.float64).clamp_(min=numerics.block_n, max=widest)
    else:
        added = numerics.block_n * scores.tiles
    return added.add_(scores.visits, alpha=2).add_(4)


def forward_error(
    x: Chunk,
    *,
    sm_scale: float,
    c: Constants,
    numerics: Numerics,
    exact_spread: bool,
    softcap: float | None = None,
) -> Forward:
    """Returns softmax, out, their sums of |terms| and the bounds of out and lse, for a chunk.

    Z = sum p exp(-E) is at most the ratio of the kernel's softmax sum to the true one::

        core  = [sum p expm1(E) |v - out| + (uc + g (1 + uc)) sum p exp(E) |v|] / Z
                + (eta + FTZ) min(1, exp(m - L + 2 max E)) sum |v| + eta_x sum p exp(E) / Z
                + (T + 1 + 2 S) FTZ    if a kernel flushes: each rescale, and the division;
                                       S = min(splits, T) splits weighted and added, if split
        core += (gamma_l + 4u)(|out| + core)
        out:  core + u_in (|out| + core) + eta_in
        lse:  log sum p exp(E) + gamma_l + u_log (1 + |ln l| + r) + 4u (max(|m|, |L|) + r)

    A kernel that multiplies P by scales of values before its cast loses (eta + FTZ) / their least.

    A sink is one more term of each sum, with a v of 0. It adds one product to the accumulation and
    one to the flushes, and two roundings to gamma_l.

    gamma_l is the error of the softmax sum: n_l + 2 T + 4 additions and products. If the sum runs
    tile by tile, n_l is the number of keys that a tile adds at once, in any order. This is at most
    its width, and at most the keys that the row sees, because adding a hidden key's 0 is exact.

    Args:
        x: The chunk.
        sm_scale: Factor on q.k.
        c: The constants of the bound.
        numerics: The kernel's declared numerics.
        exact_spread: Weight the scores' error by |v - out|; otherwise by |v| + |out|, which is
            larger and takes two GEMMs.
        softcap: As in ``reference.attention``.

    Source: Blanchard, Higham, Higham 2021 (doi 10.1093/imanum/draa038) for the softmax.
    """
    scores = scored(x, sm_scale, c, numerics, softcap)
    p, E, m, lse = scores.p, scores.error, scores.m, scores.lse
    out, out_terms = p @ x.v, p @ x.abs_v
    abs_out = out.abs()
    p_growth = E.expm1().mul_(p)
    growth, growth_of_terms = p_growth.sum(2), p_growth @ x.abs_v
    if exact_spread:
        spread = _spread(p_growth, x.v, out)
    else:
        spread = torch.addcmul(growth_of_terms, growth.unsqueeze(2), abs_out)
    Z, of_sum, largest = (p / E.exp()).sum(2), growth, E.amax(2)
    if scores.sink is not None:
        sink_growth = scores.sink.p * scores.sink.error.expm1()
        spread += sink_growth.unsqueeze(2) * abs_out
        Z += scores.sink.p * (-scores.sink.error).exp()
        of_sum = growth + sink_growth
        largest = torch.maximum(largest, scores.sink.error)
    Z = Z.masked_fill_(x.blank, 1.0).unsqueeze(2)
    # Rounding of P and accumulation, and underflow in P or its products.
    rounding = c.u_cast + (1 + c.u_cast) * c.g(
        torch.add(scores.visits, scores.tiles, alpha=numerics.block_n + 1)
    )
    lost = torch.full_like(m, (c.eta_p + c.ftz) / c.p_factor)
    if not numerics.p_normalised:
        lost *= (m - lse).add_(largest, alpha=2).exp_().clamp_(max=1.0)
    core = torch.addcmul(spread, rounding.unsqueeze(2), out_terms + growth_of_terms).div_(Z)
    core.addcmul_(lost.unsqueeze(2), x.seen.to(x.v.dtype) @ x.abs_v)
    if c.eta_dot:
        core += c.eta_dot * (p.sum(2) + growth).unsqueeze(2) / Z
    if c.eta_op:
        steps = scores.visits + 1
        if numerics.splits > 1:
            steps += 2 * scores.tiles.clamp(max=numerics.splits)
        core.add_(steps.unsqueeze(2), alpha=c.eta_op)
    # The softmax sum.
    gamma_l = c.gamma(softmax_additions(x, scores, numerics))
    if numerics.l_from == "rounded":
        gamma_l = gamma_l + c.u_p * (1 + gamma_l)
    core = torch.addcmul(core, (gamma_l + 4 * c.u).unsqueeze(2), abs_out + core)
    out_bound = torch.add(core, abs_out + core, alpha=c.u_in).add_(c.eta_in)
    # log(sum p exp(E)), since p sums to 1; log1p keeps its digits if E is tiny.
    lse_bound = of_sum.log1p().add_(gamma_l)
    lse_bound.add_(1 + scores.log_l.abs() + scores.lag, alpha=c.u_log)
    lse_bound.add_(torch.maximum(m.abs(), lse.abs()).add_(scores.lag), alpha=4 * c.u)
    return Forward(scores, out, out_terms, out_bound, lse_bound)
