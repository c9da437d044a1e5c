"""Pooled probabilities in float64: PyTorch, chunked over rows."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.reference.torch_reference import RowMasks, chunk_height

__all__ = ["POOLS", "key_blocks", "pooled_probabilities", "row_blocks", "valid_pairs"]

POOLS = ("mean", "max")


def key_blocks(p: torch.Tensor, keys: int, pool: str) -> torch.Tensor:
    """Pools p >= 0 (..., N) over keys to (..., ceil(N / keys)): sums for "mean", else maxima."""
    keys = min(keys, p.shape[-1])
    blocks: torch.Tensor = pad(p, (0, -p.shape[-1] % keys)).unflatten(-1, (-1, keys))
    return blocks.amax(-1) if pool == "max" else blocks.sum(-1)


def row_blocks(
    into: torch.Tensor, part: torch.Tensor, start: int, rows: int, pool: str
) -> torch.Tensor:
    """Pools ``part`` (B,H,R,J), the rows from ``start`` on, into the blocks ``into`` (B,H,I,J).

    Returns:
        ``into``, changed in place.
    """
    block = torch.arange(start, start + part.shape[2], device=part.device) // rows
    block = block.view(1, 1, -1, 1).expand_as(part)
    return into.scatter_reduce_(2, block, part, "amax" if pool == "max" else "sum")


def valid_pairs(
    mask: Mask, B: int, M: int, N: int, size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers of valid rows and keys of each block, int64 (B,1,I,1) and (B,1,1,J)."""
    found = []
    for lengths, length, each in zip(mask.lengths(B, M, N), (M, N), size, strict=True):
        starts = torch.arange(0, length, each, device=device)
        ends = torch.tensor(lengths, dtype=torch.int64, device=device).view(-1, 1)
        found.append((ends - starts).clamp(0, each))
    rows, keys = found
    return rows[:, None, :, None], keys[:, None, None, :]


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Returns P of a chunk of rows (B,H,R,N), 0 where not seen."""
    B, H, R, _ = q.shape
    Hk, N = k.shape[1:3]
    seen = seen.expand(B, H, R, N)
    live = seen.any(3, keepdim=True)
    q, k = q.to(torch.float64), k.to(torch.float64).repeat_interleave(H // Hk, dim=1)
    # Padding may hold NaN; the select drops it.
    scores_bhmn = torch.where(seen, q @ k.mT * sm_scale, -math.inf)
    m_bhm1 = torch.where(live, scores_bhmn.amax(3, keepdim=True), 0.0)
    e_bhmn = torch.exp(scores_bhmn - m_bhm1)
    return e_bhmn / torch.where(live, e_bhmn.sum(3, keepdim=True), 1.0)


def pooled_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    mask: Mask,
    sm_scale: float,
    pool: str,
    size: tuple[int, int],
    chunk: int | None = None,
) -> torch.Tensor:
    """Returns the mean or maximum of the probabilities of each block of pairs, in float64.

    P[m, n] = exp(s[m, n] - lse[m]) where row m sees key n, and 0 elsewhere. Block (i, j) holds the
    pairs with i rows <= m < (i + 1) rows and j keys <= n < (j + 1) keys. A pair is valid if neither
    its row nor its key is padding::

        mean   sum of P over the block / number of its valid pairs, including hidden pairs
        max    largest P of the block

    A block without a valid pair is 0. Padding may hold anything.

    Args:
        q: (B, H, M, D), any float dtype and strides.
        k: (B, Hk, N, D); H is a multiple of Hk.
        mask: The mask.
        sm_scale: Factor on q.k.
        pool: "mean" or "max".
        size: (rows, keys) of a block, >= 1.
        chunk: Rows of q at a time; None limits memory.

    Returns:
        (B, H, ceil(M / rows), ceil(N / keys)) on q's device.

    Raises:
        ValueError: pool is unknown.
    """
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}; needs one of {POOLS}")
    (B, H, M, _), N = q.shape, k.shape[2]
    rows, keys = size
    pooled = q.new_zeros((B, H, -(-M // rows), -(-N // keys)), dtype=torch.float64)
    if 0 in (B, M, N):
        return pooled
    masks = RowMasks(mask, B, H, M, N, q.device)
    height = chunk_height(chunk, B, H, N)
    for start in range(0, M, height):
        stop = min(start + height, M)
        p = _probabilities(q[:, :, start:stop], k, masks.between(start, stop), sm_scale)
        row_blocks(pooled, key_blocks(p, keys, pool), start, rows, pool)
    if pool == "mean":
        rows_of, keys_of = valid_pairs(mask, B, M, N, size, q.device)
        pooled /= (rows_of * keys_of).clamp(min=1)
    return pooled
