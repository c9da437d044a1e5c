"""The bound covers every order of a kernel's sums, also one in which all roundings err one way.

Each kernel here is correct: its roundings, exponentials and logarithms err by no more than the
model allows. Their errors have one sign, so that they add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds import forward
from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.bounds.in_numpy import units as numpy_units
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics

F = np.float32
U = 2.0**-24
TILE = 16
# In one row, a full tile comes first. Tiles that the mask divides follow, with rising maxima: in
# the first of them all keys but one are visible, in the others one key is.
HEAVY, LIGHT = 40, 260
TILES = 1 + HEAVY + LIGHT


@dataclass(frozen=True, kw_only=True)
class _Edges(Mask, uniform=True):
    """Hides the last key of the tiles after the first, and all but the first key after HEAVY."""

    def mask_mod(self, b, h, m, n, *, M, N):
        return (n < TILE) | ((n < TILE * (1 + HEAVY)) & (n % TILE < TILE - 1)) | (n % TILE == 0)


def _scores() -> np.ndarray:
    """The scores of the row: maxima of edge tiles rise by 2**-16, and the first tile's is above."""
    scores = np.arange(TILES * TILE) // TILE * 2.0**-16
    scores[0] = TILES * 2.0**-16
    return scores


def _visits() -> Iterator[slice]:
    """The tiles in the order of a kernel that visits edge tiles first."""
    for tile in (*range(1, TILES), 0):
        yield slice(tile * TILE, tile * TILE + TILE)


def _lowest(x: float) -> F:
    """The exponential of x with the largest error towards 0; exp(0) is exact."""
    return F(1) if x == 0 else F(math.exp(x) * (1 - 2.0**-22) * (1 + 2.0**-25))


def _lse_with_edges_first(scores: np.ndarray, seen: np.ndarray) -> float:
    """lse of a row by an online softmax in float32, whose exponentials err towards 0."""
    m, total = F(-math.inf), F(0)
    for tile in _visits():
        visible = scores[tile][seen[tile]].astype(F)
        risen = max(m, visible.max())
        weights = [_lowest(float(x) - float(risen)) for x in visible]
        alpha = _lowest(float(m) - float(risen)) if m > -math.inf else F(0)
        total = F(total * alpha) + np.sum(weights, dtype=F)
        m = risen
    log = math.log(float(total))
    return float(F(m + F(log - 2.0**-22 * (1 + abs(log)))))


def _bounds_of_lse(scores: np.ndarray, mask: Mask, numerics: Numerics) -> tuple[float, float]:
    """The bounds of lse in NumPy and in PyTorch, for one row with the given scores."""
    k = scores.reshape(1, 1, -1, 1)
    one, v = np.ones((1, 1, 1, 1)), np.zeros_like(k)
    call = {"mask": mask, "sm_scale": 1.0, "in_dtype": "fp32", "numerics": numerics}
    of_numpy = numpy_check.bound(one, k, v, one, **call).lse.item()
    of_torch = judge(*map(torch.from_numpy, (one, k, v, one)), **call).bound.lse.item()
    return of_numpy, of_torch


def test_a_kernel_that_visits_edge_tiles_first_is_within_the_bound_of_its_predicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, numerics = _scores(), Numerics(l_order="tile")
    seen = _Edges().mask_mod(0, 0, 0, np.arange(len(scores)), M=1, N=len(scores))
    error = abs(_lse_with_edges_first(scores, seen) - np.logaddexp.reduce(scores[seen]))
    assert error < min(_bounds_of_lse(scores, _Edges(), numerics))
    # From either end, the maximum changes only once after the first tile.
    monkeypatch.setattr(
        numpy_check, "rescales", lambda *rest: numpy_units.rescales(*rest[:4], False)
    )
    monkeypatch.setattr(forward, "_tiles_above", _from_either_end)
    assert error > max(_bounds_of_lse(scores, _Edges(), numerics))


def _from_either_end(
    tile_max: torch.Tensor, live_tiles: torch.Tensor, slack: torch.Tensor
) -> torch.Tensor:
    return forward._rescales(tile_max, live_tiles, slack, 1).unsqueeze(2).expand_as(tile_max)


@pytest.mark.parametrize("together", [1, 128, 2**16])
def test_splits_can_start_at_any_tile(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_STARTS", together)
    drawn = torch.Generator().manual_seed(1)
    live = torch.rand(2, 3, 7, generator=drawn, dtype=torch.float64) < 0.7
    maxima = torch.randint(-2, 3, (2, 3, 7), generator=drawn).to(torch.float64)
    maxima.masked_fill_(~live, -math.inf)
    slack = torch.rand(2, 3, generator=drawn, dtype=torch.float64)
    of_parts = numpy_units._possible_changes_of_parts
    want = torch.empty(slack.shape, dtype=torch.float64)
    for row in np.ndindex(*slack.shape):
        tiles = maxima[row][live[row]].tolist()
        want[row] = max(of_parts(x, float(slack[row])) for x in (tiles, tiles[::-1]))
    assert torch.equal(forward._rescales(maxima, live, slack, 2), want)


@pytest.mark.parametrize(
    ("levels", "changes"),
    [
        ([0.0], [0]),
        ([3.0, 2.0, 1.0, 0.0], [0, 1, 2, 3]),
        ([3.0, 0.0, 1.0, 2.0], [0, 3, 2, 1]),
        ([1.0, 1.0, 0.0], [1, 1, 2]),  # rounding decides which of two equal maxima is larger
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
def test_under_a_predicate_each_key_counts_the_tiles_above_its_own(
    levels: list[float], changes: list[int], splits: int
) -> None:
    """The growth of lse's bound is the mean of the counts, weighted by p."""
    scores = np.repeat(levels, TILE)
    p = np.exp(levels) / np.exp(levels).sum()
    numerics = Numerics(splits=splits)
    once = _bounds_of_lse(scores, Mask(), Numerics(block_n=TILE * len(levels)))
    # A wide tile is never rescaled. Its sum has other roundings, which depend on the tiles alone.
    sums = TILE * len(levels) + 2 * len(levels) + 4, TILE * len(levels) + 2 + 4
    for alone, bound in zip(once, _bounds_of_lse(scores, _Everything(), numerics), strict=True):
        grown = bound - alone - (_gamma(sums[0]) - _gamma(sums[1]))
        assert grown * 2.0**22 == pytest.approx(p @ changes, rel=1e-4, abs=1e-4)


WIDE = 256  # a tile, whose weights are added one after the other


def _lost_weights() -> np.ndarray:
    """Scores whose weights beside the first one, 1, are just below half of its spacing."""
    middle = np.abs(np.arange(1, WIDE) - WIDE / 2) / (WIDE / 2)
    return np.concatenate([[0.0], math.log(U) - 0.02 + 0.01 * middle]).astype(F).astype(np.float64)


def test_a_wide_tile_whose_weights_are_added_in_turn_is_within_the_bound() -> None:
    scores = _lost_weights()
    total = F(0)
    for score in scores:
        total += F(math.exp(score))
    # The kernel's exponentials, logarithm and maximum are exact here.
    error = abs(math.log(total) - np.logaddexp.reduce(scores))
    narrow, wide = (Numerics(l_order="tile", l_tile=width) for width in (0, WIDE))
    assert max(_bounds_of_lse(scores, Mask(), narrow)) < error
    assert error < min(_bounds_of_lse(scores, Mask(), wide))


@pytest.mark.parametrize(
    ("keys", "l_tile", "added"), [(5, 64, 16), (40, 64, 40), (80, 64, 64), (80, 0, 16), (80, 8, 16)]
)
def test_a_tile_adds_its_visible_keys_at_once(keys: int, l_tile: int, added: int) -> None:
    scores = np.zeros(keys)
    by_tile = _bounds_of_lse(scores, Mask(), Numerics(l_order="tile", l_tile=l_tile))
    in_any_order = _bounds_of_lse(scores, Mask(), Numerics())
    tiles = -(-keys // TILE)
    expected = _gamma(TILE * tiles + 2 * tiles + 4) - _gamma(added + 2 * tiles + 4)
    for wider, narrower in zip(in_any_order, by_tile, strict=True):
        assert wider - narrower == pytest.approx(expected, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("heads", [2, 5, 17])
@pytest.mark.parametrize("in_dtype", ["fp16", "bf16"])
def test_each_addition_of_stored_heads_may_underflow(in_dtype: str, heads: int) -> None:
    """Where all gradients are 0, only underflow is left: once a head, and once an addition."""
    zeros = [np.zeros((1, h, 1, 1)) for h in (heads, 1, 1, heads)]
    call = {"mask": Mask(), "sm_scale": 1.0, "in_dtype": in_dtype}
    bounds = {}
    for group_sum in ("fp32", "dtype"):
        numerics = Numerics(group_sum=group_sum)
        of_numpy = numpy_check.bound(*zeros, **call, numerics=numerics).dk.item()
        of_torch = judge(*map(torch.from_numpy, zeros), **call, numerics=numerics).bound.dk.item()
        bounds[group_sum] = of_numpy, of_torch
    eta = {"fp16": 2.0**-25, "bf16": 2.0**-126}[in_dtype]
    for chain, apart in zip(*bounds.values(), strict=True):
        # One chain stores once; heads apart store once each, and add heads - 1 times.
        assert apart - chain == pytest.approx((2 * heads - 2) * eta, rel=2e-2)


def _gamma(n: int) -> float:
    return n * U / (1 - n * U)


@dataclass(frozen=True, kw_only=True)
class _Everything(Mask, uniform=True):
    """A predicate that hides nothing."""

    def mask_mod(self, b, h, m, n, *, M, N):
        return n >= 0
