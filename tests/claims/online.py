"""A minimal tiled forward pass in float64, for claims about its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.reference import torch_reference

__all__ = ["Seen", "State", "attend", "blocks", "ordered_partitions", "softmax"]


class State(NamedTuple):
    """The running state of a pass: acc (M, Dv) before the division, l and m (M,)."""

    acc: torch.Tensor
    l: torch.Tensor  # noqa: E741  # the letter of every paper
    m: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        """acc / l, (M, Dv); rows with l = 0 have no visible key and give 0."""
        return self.acc / torch.where(self.l > 0, self.l, 1.0)[:, None]

    @property
    def lse(self) -> torch.Tensor:
        """m + ln l, (M,): the natural log-sum-exp of a pass that uses exp."""
        return self.m + self.l.log()


class Seen(NamedTuple):
    """A mask from a dense table, bool (M, N)."""

    table: torch.Tensor

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """The table for all batch entries and heads, (1, 1, M, N)."""
        return self.table.view(1, 1, M, N).to(device)


def attend(
    scores: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[Sequence[int]],
    *,
    exp: Callable[[torch.Tensor], torch.Tensor] = torch.exp,
    start: tuple[float, float] = (0.0, -math.inf),
) -> State:
    """Updates (acc, l, m) with tiles of keys, one after the other.

    Args:
        scores: (M, N) float64, -inf where hidden.
        v: (N, Dv).
        tiles: The keys of each tile.
        exp: The exponential in the base of the scores.
        start: l and m before the first tile.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, lines 8 to 11.
    """
    M = scores.shape[0]
    l_i, m_i = (torch.full((M,), value, dtype=scores.dtype) for value in start)
    acc = v.new_zeros((M, v.shape[1]))
    for keys in tiles:
        s = scores[:, keys]
        m_new = torch.maximum(m_i, s.amax(1))
        # A row without a visible key so far subtracts 0, since -inf - -inf is NaN.
        pivot = torch.where(m_new == -math.inf, 0.0, m_new)
        p, alpha = exp(s - pivot[:, None]), exp(m_i - pivot)
        l_i = l_i * alpha + p.sum(1)
        acc = acc * alpha[:, None] + p @ v[keys]
        m_i = m_new
    return State(acc, l_i, m_i)


def softmax(
    scores: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> Outputs[torch.Tensor]:
    """The oracle's answer for given scores (M, N), without the axes of batch and heads.

    The queries are the scores and the keys are unit vectors, so dq is the gradient of the scores.
    Gradients are for dout = 1.
    """
    M, N = scores.shape
    q, k, values = (x[None, None] for x in (scores, torch.eye(N, dtype=scores.dtype), v))
    mask = Seen(torch.ones(M, N, dtype=torch.bool) if seen is None else seen)
    dout = v.new_ones((1, 1, M, v.shape[1]))
    truth = torch_reference.attention(q, k, values, dout, mask=mask, sm_scale=1.0)
    return Outputs(*(x[0, 0] for x in truth))


def blocks(N: int, size: int) -> list[list[int]]:
    """Keys 0 to N - 1 in tiles of one size; the last may be shorter."""
    return [list(range(start, min(start + size, N))) for start in range(0, N, size)]


def ordered_partitions(keys: tuple[int, ...]) -> Iterator[list[list[int]]]:
    """Every way to deal keys into tiles, in every order of the tiles."""
    if not keys:
        yield []
    for size in range(1, len(keys) + 1):
        for first in combinations(keys, size):
            rest = tuple(key for key in keys if key not in first)
            for others in ordered_partitions(rest):
                yield [list(first), *others]
