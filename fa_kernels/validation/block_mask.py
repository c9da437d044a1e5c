"""Validation of ``block_mask`` and ``block_size``."""

from __future__ import annotations

import torch

from fa_kernels.configs import Config
from fa_kernels.runtime.launch_cache import cdiv

__all__ = ["check_block_mask", "check_tiles"]


def check_block_mask(
    block_mask: object, block_size: object, q: torch.Tensor, k: torch.Tensor
) -> None:
    """Checks ``block_mask`` and ``block_size`` of ``flash_attention``; q and k are checked.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the mask does not cover q and k.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size is {block_size!r}; needs an int")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; needs an int >= 1")
    if not isinstance(block_mask, torch.Tensor):
        raise TypeError(f"block_mask is {type(block_mask).__name__}; needs a bool torch.Tensor")
    if block_mask.dtype != torch.bool:
        raise TypeError(f"block_mask has dtype {block_mask.dtype}; needs torch.bool")
    if block_mask.device != q.device:
        raise ValueError(f"block_mask is on {block_mask.device}; needs the device of q, {q.device}")
    H, (rows, columns) = q.shape[1], (cdiv(x.shape[2], block_size) for x in (q, k))
    if tuple(block_mask.shape) not in ((H, rows, columns), (1, rows, columns)):
        raise ValueError(
            f"block_mask has shape {tuple(block_mask.shape)}; needs ({H} or 1, {rows}, {columns}), "
            f"one element for each head and block of {block_size} x {block_size}"
        )


def check_tiles(block_size: int, config: Config) -> None:
    """Checks that ``block_size`` is a multiple of every tile of a complete configuration.

    Raises:
        NotImplementedError: It is not.
    """
    tiles = (config.forward, config.dkdv, config.dq)
    largest = max(size for tile in tiles for size in (tile.block_m, tile.block_n))
    # Tile sizes are powers of two, so a multiple of the largest is a multiple of all.
    if block_size % largest:
        raise NotImplementedError(
            f"block_size is {block_size}; supported are multiples of {largest}, the largest tile "
            "of this config"
        )
