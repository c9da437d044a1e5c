"""Sequence lengths of drawn problems: the domain they are drawn in, and how M and N share its cost.

Lengths gather around tile edges, and most pairs span two tiles both ways. Bounds are worked out
before a length is drawn, so nothing is filtered.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from hypothesis import strategies as st

from fa_verify.oracles.masks.mask import Mask

__all__ = ["Domain", "Draw", "Regime", "draw_seqlens", "seqlen_regimes", "tile_count"]

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Regime(NamedTuple):
    """Inclusive bounds of M and N, how often they are drawn, and whether a size can be 0."""

    weight: int
    m_low: int
    m_high: int
    n_low: int
    n_high: int
    m_zero: bool = False
    n_zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The arguments of ``strategies.problems``; what is fixed is a choice of one."""

    dtypes: tuple[str, ...]
    configs: tuple[str, ...]
    masks: tuple[str, ...]
    max_seqlen: int
    seqlen_multiple: int
    tile: int
    max_batch: int
    max_heads: int
    gqa: bool
    m_ne_n: bool
    dv_ne_d: bool
    head_dims: tuple[int, ...]
    scales: tuple[float | None, ...]
    layouts: tuple[str, ...]
    inputs: tuple[str, ...]
    dout: tuple[str, ...]
    dlse: tuple[str, ...]
    softcaps: tuple[float | None, ...]
    alibis: tuple[str, ...]
    biases: tuple[str, ...]
    dirty: tuple[str, ...]
    max_cost: int
    padding: bool
    hidden: bool
    empty_rows: bool
    zero_sizes: bool
    device: str
    mask: type[Mask] | None = None

    @property
    def forced(self) -> int:
        """How many of the three features have to occur."""
        return self.padding + self.hidden + self.empty_rows

    @property
    def empty_by_position(self) -> bool:
        """Empty rows come from a right bound and M > N, not from a batch entry without keys."""
        return self.empty_rows and ("causal" in self.masks or "window" in self.masks)


@lru_cache(maxsize=64)
def _seqlen_pool(max_seqlen: int, multiple: int, tile: int) -> tuple[int, ...]:
    """Ascending positive lengths; tile edges stand in it four times, primes twice."""
    pool = []
    composite = bytearray(max_seqlen + 1)
    for length in range(1, max_seqlen + 1):
        prime = length > 1 and not composite[length]
        if prime:
            for multiple_of in range(length * length, max_seqlen + 1, length):
                composite[multiple_of] = 1
        if length % multiple == 0:
            edge = length > 1 and (length + 1) % tile <= 2
            pool.extend([length] * (4 if edge else 2 if prime else 1))
    return tuple(pool)


def _smallest(domain: Domain, low: int) -> int:
    """The smallest sequence length >= low, 0 included."""
    return -(-low // domain.seqlen_multiple) * domain.seqlen_multiple


def tile_count(domain: Domain, length: int) -> int:
    """Tiles of a length, at least 1: what one head costs along that axis."""
    return max(1, -(-length // domain.tile))


def _max_length(domain: Domain, other: int) -> int:
    """The longest sequence that the budget allows beside the other length, one head deep."""
    return domain.tile * (domain.max_cost // tile_count(domain, other))


def seqlen_regimes(domain: Domain) -> tuple[Regime, ...]:
    """Bounds of (M, N) that can be met, the smallest first; two tiles both ways most often.

    The lopsided ones begin where the smallest does, so that shrinking can change over to it.

    Args:
        domain: Limits of the lengths and of their cost, and which features are forced.

    Returns:
        The regimes; none if no lengths satisfy the domain.
    """
    tile, most = domain.tile, domain.max_seqlen
    low = _smallest(domain, 1 + domain.forced)
    zero = domain.zero_sizes and not domain.forced
    wanted = [
        Regime(2, low, tile, low, tile, m_zero=zero and not domain.m_ne_n),
        Regime(12, tile + 1, most, tile + 1, most),
    ]
    if domain.m_ne_n:
        wanted += [
            Regime(2, low, most, low, tile, n_zero=zero),
            Regime(2, low, tile, low, most, m_zero=zero, n_zero=zero),
        ]
    if domain.empty_rows and not domain.empty_by_position and "padding" not in domain.masks:
        wanted = [Regime(1, low, most, 0, 0)]
    regimes = []
    for regime in wanted:
        n_low = _smallest(domain, regime.n_low)
        m_low = _smallest(domain, regime.m_low)
        if domain.empty_by_position and domain.m_ne_n:
            m_low = _smallest(domain, max(m_low, n_low + 1))
        m_high = min(regime.m_high, _max_length(domain, n_low), most)
        if not domain.m_ne_n:
            m_high = min(m_high, tile * math.isqrt(domain.max_cost))
        if m_low <= m_high and n_low <= min(regime.n_high, _max_length(domain, m_low), most):
            regimes.append(regime._replace(m_low=m_low, m_high=m_high, n_low=n_low))
    return tuple(regimes)


def _draw_length(
    draw: Draw, domain: Domain, low: int, high: int, zero: bool, other: int = 0
) -> int:
    """A length in [low, high], or 0 one time in three if that is allowed.

    Past one tile it equals ``other`` one time in twelve.
    """
    if low >= high and not zero:
        return low
    pool = _seqlen_pool(domain.max_seqlen, domain.seqlen_multiple, domain.tile)
    start, stop = bisect_left(pool, low), bisect_right(pool, high)
    gap, after = stop, stop
    if low <= other <= high and other > domain.tile:
        gap, after = bisect_left(pool, other), bisect_right(pool, other)
    count = stop - start - (after - gap)
    equal = 1 + count // 11 if low <= other <= high else 0
    zeros = 1 + count // 2 if zero else 0
    index: int = draw(st.sampled_from(range(count + equal + zeros)))
    if index >= count:
        return other if index < count + equal else 0
    index += start
    return pool[index if index < gap else index + after - gap]


def draw_seqlens(draw: Draw, domain: Domain, regimes: tuple[Regime, ...]) -> tuple[int, int]:
    """(M, N) within the budget for one head.

    Args:
        draw: Of a composite strategy.
        domain: What the lengths are drawn in.
        regimes: What ``seqlen_regimes`` gives for it, at least one.
    """
    regime = draw(st.sampled_from([r for r in regimes for _ in range(r.weight)]))
    M = _draw_length(draw, domain, regime.m_low, regime.m_high, regime.m_zero)
    if not domain.m_ne_n:
        return M, M
    n_high = min(regime.n_high, _max_length(domain, M))
    if domain.empty_by_position:
        n_high = min(n_high, M - 1)
    return M, _draw_length(draw, domain, regime.n_low, n_high, regime.n_zero, other=M)
