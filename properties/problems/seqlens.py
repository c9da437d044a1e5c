"""Draw sequence lengths M and N within a domain and its limit on cost.

Lengths cluster around tile edges, and in most pairs both M and N span two tiles. Bounds are derived
before a length is drawn, so no draw is filtered out.
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

__all__ = [
    "Domain",
    "Draw",
    "Regime",
    "among",
    "below",
    "draw_seqlens",
    "seqlen_regimes",
    "tile_count",
]

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Regime(NamedTuple):
    """Inclusive bounds of M and N, their weight in the draw, and whether M or N can be 0."""

    weight: int
    m_low: int
    m_high: int
    n_low: int
    n_high: int
    m_zero: bool = False
    n_zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The arguments of ``strategies.problems``; a fixed field is a tuple of one value."""

    dtypes: tuple[str, ...]
    configs: tuple[str, ...]
    masks: tuple[str, ...]
    always_causal: bool
    max_seqlen: int
    seqlen_multiple: int
    tile: int
    max_batch: int
    max_heads: int
    max_pairs: int
    gqa: bool
    m_ne_n: bool
    m_gt_n: bool
    one_query: bool
    dv_ne_d: bool
    head_dims: tuple[int, ...]
    head_dims_v: tuple[int, ...]
    scales: tuple[float | None, ...]
    layouts: tuple[str, ...]
    inputs: tuple[str, ...]
    dout: tuple[str, ...]
    dlse: tuple[str, ...]
    softcaps: tuple[float | None, ...]
    alibis: tuple[str, ...]
    biases: tuple[str, ...]
    sinks: tuple[str, ...]
    dirty: tuple[str, ...]
    max_cost: int
    padding: bool
    hidden: bool
    empty_rows: bool
    zero_sizes: bool
    zero_total: bool
    device: str
    mask: type[Mask] | None = None

    @property
    def forced(self) -> int:
        """Number of forced features among ``padding``, ``hidden`` and ``empty_rows``."""
        return self.padding + self.hidden + self.empty_rows

    @property
    def empty_by_position(self) -> bool:
        """Whether forced empty rows result from a right bound and M > N, not from a length of 0."""
        by_position = "causal" in self.masks or "window" in self.masks
        return self.empty_rows and by_position and not self.one_query


@lru_cache(maxsize=4096, typed=True)
def among(*choices: Any) -> st.SearchStrategy[Any]:
    """Return the strategy that draws one of some values, built once for all problems.

    Hypothesis inspects the values of a strategy before its first draw.
    """
    return st.sampled_from(choices)


@lru_cache(maxsize=4096)
def below(count: int) -> st.SearchStrategy[int]:
    """Return the strategy that draws one of 0, 1, ... count - 1, built once for all problems."""
    return st.sampled_from(range(count))


@lru_cache(maxsize=64)
def _seqlen_pool(max_seqlen: int, multiple: int, tile: int) -> tuple[int, ...]:
    """Return ascending positive lengths; tile edges occur four times, primes twice."""
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
    """Return the smallest multiple of ``seqlen_multiple`` that is >= low, possibly 0."""
    return -(-low // domain.seqlen_multiple) * domain.seqlen_multiple


def tile_count(domain: Domain, length: int) -> int:
    """Return the number of tiles of a length, at least 1: the cost of a head along the axis."""
    return max(1, -(-length // domain.tile))


def _max_length(domain: Domain, other: int) -> int:
    """Return the largest length that the limit on cost allows for one head, given the other."""
    return domain.tile * (domain.max_cost // tile_count(domain, other))


def seqlen_regimes(domain: Domain) -> tuple[Regime, ...]:
    """Return the satisfiable bounds of (M, N), smallest first; two tiles both ways most often.

    Regimes with one long side start at the same lengths as the smallest regime, so that shrinking
    can switch to it.

    Args:
        domain: Limits of the lengths and the cost, and the forced features.

    Returns:
        The regimes; empty if no lengths satisfy the domain.
    """
    tile, most = domain.tile, domain.max_seqlen
    low = _smallest(domain, 1 + domain.forced)
    zero = domain.zero_sizes and not domain.forced
    if domain.one_query:
        return _regimes_of_one_query(domain, low, n_zero=zero and domain.m_gt_n)
    wanted = [
        Regime(2, low, tile, low, tile, m_zero=zero and not domain.m_ne_n),
        Regime(12, tile + 1, most, tile + 1, most),
    ]
    if domain.m_ne_n:
        wanted += [
            *[Regime(2, low, most, low, tile, n_zero=zero)] * domain.m_gt_n,
            Regime(2, low, tile, low, most, m_zero=zero, n_zero=zero and domain.m_gt_n),
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
        if not (domain.m_ne_n and domain.m_gt_n):
            m_high = min(m_high, tile * math.isqrt(domain.max_cost))
        if m_low <= m_high and n_low <= min(regime.n_high, _max_length(domain, m_low), most):
            regimes.append(regime._replace(m_low=m_low, m_high=m_high, n_low=n_low))
    return tuple(regimes)


def _regimes_of_one_query(domain: Domain, low: int, n_zero: bool) -> tuple[Regime, ...]:
    """Return the regimes of M = 1: keys of one tile, and of several."""
    most = min(domain.max_seqlen, _max_length(domain, 1))
    if not domain.m_ne_n:
        return (Regime(1, 1, 1, 1, 1),)
    if domain.empty_rows and "padding" not in domain.masks:
        return (Regime(1, 1, 1, 0, 0),)
    wanted = (
        Regime(2, 1, 1, low, min(domain.tile, most), n_zero=n_zero),
        Regime(6, 1, 1, _smallest(domain, max(low, domain.tile + 1)), most),
    )
    return tuple(regime for regime in wanted if regime.n_low <= regime.n_high)


def _draw_length(
    draw: Draw, domain: Domain, low: int, high: int, zero: bool, other: int = 0
) -> int:
    """Draw a length in [low, high]; with ``zero``, 0 in one of three draws.

    If ``other`` exceeds one tile, the length equals it in one of twelve draws.
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
    index: int = draw(below(count + equal + zeros))
    if index >= count:
        return other if index < count + equal else 0
    index += start
    return pool[index if index < gap else index + after - gap]


def draw_seqlens(draw: Draw, domain: Domain, regimes: tuple[Regime, ...]) -> tuple[int, int]:
    """Draw (M, N) within the limit on cost for one head.

    Args:
        draw: Argument of a composite strategy.
        domain: The domain.
        regimes: The result of ``seqlen_regimes`` for the domain, not empty.
    """
    regime = draw(among(*(r for r in regimes for _ in range(r.weight))))
    M = _draw_length(draw, domain, regime.m_low, regime.m_high, regime.m_zero)
    if not domain.m_ne_n:
        return M, M
    n_high = min(regime.n_high, _max_length(domain, M))
    if domain.empty_by_position:
        n_high = min(n_high, M - 1)
    n_low = regime.n_low if domain.m_gt_n else max(regime.n_low, M)
    return M, _draw_length(draw, domain, n_low, max(n_low, n_high), regime.n_zero, other=M)
