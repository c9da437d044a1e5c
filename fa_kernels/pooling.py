"""Validation of the arguments of ``pooled_attention_probs``, and their form for the launcher."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from fa_kernels.kernels.portable.pool import sees_block
from fa_kernels.schedule.block_sparse import Predicate, predicate_of
from fa_kernels.validation.arguments import Arguments, Request, prepared
from fa_kernels.validation.opaque_handles import value_of

__all__ = ["POOLS", "Pooling", "check_lse", "check_pooling", "prepared_pooling"]

POOLS = ("mean", "max")


class Pooling(NamedTuple):
    """Checked pooling arguments, in types that operators accept.

    Args:
        pool: One of ``POOLS``.
        rows: Query rows of a pool block.
        keys: Keys of a pool block.
    """

    pool: str
    rows: int
    keys: int


def check_pooling(pool: object, pool_size: object) -> Pooling:
    """Checks ``pool`` and ``pool_size`` of ``pooled_attention_probs``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """
    if not isinstance(pool, str):
        raise TypeError(f"pool is {pool!r}; needs 'mean' or 'max'")
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}; needs 'mean' or 'max'")
    if not isinstance(pool_size, tuple | list) or len(pool_size) != 2:
        raise TypeError(f"pool_size is {pool_size!r}; needs a pair (rows, keys)")
    for size in pool_size:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"pool_size holds {size!r}; needs ints")
        if size < 1:
            raise ValueError(f"pool_size holds {size}; needs ints >= 1")
    return Pooling(pool, *pool_size)


def check_lse(lse: object, q: torch.Tensor) -> torch.Tensor:
    """Checks ``lse`` (B, H, M) and returns it contiguous.

    Raises:
        TypeError: ``lse`` is no tensor.
        ValueError: Its shape, dtype or device differs from the lse of ``flash_attention``.
    """
    if not isinstance(lse, torch.Tensor):
        raise TypeError(f"lse is {type(lse).__name__}; needs a torch.Tensor")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}; needs {tuple(q.shape[:3])}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != dtype:
        raise ValueError(f"lse has dtype {lse.dtype}; needs {dtype}")
    if lse.device != q.device:
        raise ValueError(f"lse is on {lse.device}; needs the device of q, {q.device}")
    return lse.contiguous()


def prepared_pooling(q: torch.Tensor, k: torch.Tensor, request: Request) -> Arguments:
    """Returns a request in the launcher's form.

    It has no block maps, because pool blocks need not align with tiles. A predicate applies
    ``block_mask`` and the mask's own predicate pair by pair.
    """
    plain = prepared(q, k, k, request._replace(block_mask=None, mask=""))
    predicate = None
    if request.mask:
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        predicate = predicate_of(value_of(request.mask), *sizes, q.device)
    if request.block_mask is not None:
        blocks = request.block_mask.to(torch.int32).expand(q.shape[1], -1, -1)
        predicate = Predicate(sees_block, (blocks, *blocks.stride(), request.block_size))
    return dataclasses.replace(plain, predicate=predicate)
