"""Functionals of out along the values of key tiles, and the parts of out that the tiles make up.

With P the exact probabilities, out is a sum of parts: sum_n p_mn v_n over the keys n of a tile. A
kernel that gives a tile a wrong weight errs along its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from fa_verify.oracles.bounds.error_model import chunks
from fa_verify.oracles.reference.torch_reference import DenseMask

__all__ = ["along_parts", "parts"]

_PAIRS = 2**22  # pairs of which a float64 matrix is in memory at a time


class _Heads:
    """The inputs of a problem, by chunks of rows."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, *,
        mask: DenseMask, sm_scale: float,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.lse = q, k, v, lse
        self.mask, self.sm_scale = mask, sm_scale

    def probabilities(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yields rows, their P (Z, R, N), and v (Z, N, Dv); Z is entry and key/value head."""
        (B, H), N = self.q.shape[:2], self.k.shape[2]
        rows = max(1, _PAIRS // (B * H * N))
        inputs = (self.q, self.k, self.v, self.v.new_zeros(*self.q.shape[:3], 1))
        for here, x in chunks(*inputs, None, None, None, mask=self.mask, apart=1, rows=rows):
            lse = self.lse[:, :, here].reshape(x.empty.shape).masked_fill(x.empty, 0.0)
            s = (x.q @ x.k.mT).mul_(self.sm_scale)
            yield here, s.sub_(lse.unsqueeze(2)).exp_().masked_fill_(x.hidden, 0.0), x.v


def along_parts(
    signed: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor,
    mask: DenseMask,
    sm_scale: float,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns products of rows with their parts of out, by key tile.

    Args:
        signed: Tensors x of shape (B, H, M, Dv), float64.
        q: (B, H, M, D), any float dtype.
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        lse: (B, H, M), float64, the true one.
        mask: The mask.
        sm_scale: Factor on q.k.
        tile: Keys of a tile.

    Returns:
        sum_n p x.v for each of ``signed``, (len(signed), B, H, M, tiles), and the largest p of each
        row, (B, H, M).
    """
    N, shape = k.shape[2], q.shape[:2]
    products: list[torch.Tensor] = []
    largest: list[torch.Tensor] = []
    for here, p, values in _Heads(q, k, v, lse, mask=mask, sm_scale=sm_scale).probabilities():
        found = []
        for x in signed:
            each = (x[:, :, here].reshape(*p.shape[:2], -1) @ values.mT).mul_(p)
            of_tiles = pad(each, (0, -N % tile)).unflatten(2, (-1, tile)).sum(3)
            found.append(of_tiles.view(*shape, -1, of_tiles.shape[2]))
        products.append(torch.stack(found))
        largest.append(p.amax(2).view(*shape, -1))
    return torch.cat(products, 3), torch.cat(largest, 2)


def parts(
    keys: slice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor,
    mask: DenseMask,
    sm_scale: float,
) -> torch.Tensor:
    """Returns sum_n p v over some keys, (B, H, M, Dv); arguments are as in ``along_parts``."""
    found = [
        (p[:, :, keys] @ values[:, keys]).view(*q.shape[:2], -1, v.shape[3])
        for _, p, values in _Heads(q, k, v, lse, mask=mask, sm_scale=sm_scale).probabilities()
    ]
    return torch.cat(found, 2)
