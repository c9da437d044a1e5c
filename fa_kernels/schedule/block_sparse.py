"""Block maps: lists of the tiles that each tile visits.

For a mask with a predicate, one launch classifies the finest tiles of all kernels, and each
kernel's map is derived from the result. For a ``block_mask``, one launch per kernel makes its map.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from fa_kernels.configs import Config, Tile
from fa_kernels.kernels.portable.block_lists import block_lists_kernel, everywhere
from fa_kernels.kernels.portable.classify_blocks import classify_blocks_kernel
from fa_kernels.kernels.portable.lpt_order import lpt_order_kernel
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.device_cache import cached_on_device
from fa_kernels.runtime.launch_cache import cdiv, run

__all__ = [
    "VISIBLE",
    "BlockMap",
    "BlockMaps",
    "Predicate",
    "block_maps",
    "maps_of_blocks",
    "predicate_of",
]


_NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)
# Fewer elements than this have 32-bit offsets.
_MOST = 2**31


class Predicate(NamedTuple):
    """A mask's predicate: a jit function of (b, h, m, n, args), and args."""

    function: Any
    args: tuple[Any, ...]


class BlockMap(NamedTuple):
    """The tiles that each tile of a kernel visits.

    Args:
        lists: int32 (B, H, tiles, 2 + tiles of the other sequence). A row holds the number of
            partially visible tiles, the number of fully visible tiles, the indices of the former
            and the indices of the latter, each ascending. The rest of a row is not read.
        order: int32 (B, H, tiles), in dkdv (B, Hk, tiles): the tiles of each head, or group of
            heads, in the order of programs.
    """

    lists: torch.Tensor
    order: torch.Tensor


class BlockMaps(NamedTuple):
    """The map of each kernel; None for a kernel that is not launched."""

    forward: BlockMap | None
    dkdv: BlockMap | None
    dq: BlockMap | None


# The predicate under the block maps of a ``block_mask``: it hides no further pair.
VISIBLE = Predicate(everywhere, (0,))
# Tiles that a step of the kernels for lists and orders handles.
_CHUNK = 64


@cached_on_device(most=64)
def predicate_of(
    mask: Any, B: int, H: int, M: int, N: int, device: torch.device
) -> Predicate | None:
    """Returns a mask's predicate; None if lengths and window describe the mask."""
    # A cached tensor outlives the call, so it must not be an inference tensor.
    with torch.inference_mode(False):
        native = mask.native(B, H, M, N, device)
        return None if native is None else Predicate(native[0], _widened(native[1]))


def _widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Widens the tables in a predicate's arguments to 32 bits.

    Triton 3.6 takes the narrowest load that reaches a dot for the width of the dot's operands,
    which breaks dots in float64.
    """
    widened = []
    for x in args:
        if isinstance(x, tuple):
            x = _widened(x)
        elif isinstance(x, torch.Tensor) and x.dtype in _NARROW:
            x = x.to(torch.int32)
        widened.append(x)
    return tuple(widened)


@cached_on_device(most=64)
def block_maps(
    mask: Any,
    B: int,
    H: int,
    Hk: int,
    M: int,
    N: int,
    window: tuple[int, int],
    lengths: tuple[torch.Tensor, torch.Tensor],
    config: Config,
) -> BlockMaps:
    """Returns the block maps of a mask with a predicate.

    Args:
        mask: A mask with a predicate; see ``MaskLike``.
        B: Batch entries.
        H: Query heads.
        Hk: Key/value heads.
        M: Query rows.
        N: Keys.
        window: (window_left, window_right), both given.
        lengths: int32 (B,) of queries and of keys, on the device.
        config: Complete tile configuration.

    Raises:
        NotImplementedError: There are too many tiles to classify.
    """
    seqlens_q, seqlens_k = lengths
    device = seqlens_q.device
    predicate = predicate_of(mask, B, H, M, N, device)
    assert predicate is not None
    tiles = (config.forward, config.dkdv, config.dq)
    with torch.inference_mode(False):
        fine = Tile(min(t.block_m for t in tiles), min(t.block_n for t in tiles))
        # Whole tiles of every kernel: all sizes are powers of two.
        m_blocks = _blocks(M, max(t.block_m for t in tiles), fine.block_m)
        n_blocks = _blocks(N, max(t.block_n for t in tiles), fine.block_n)
        shape = (B, H, m_blocks, n_blocks, 3)
        # equivalent: The product has a factor of 3, so it is never 2**31 itself.
        if math.prod(shape) >= _MOST:
            raise NotImplementedError(
                f"mask has a predicate, and M = {M}, N = {N} make {math.prod(shape) // 3:,} tiles "
                f"of {fine.block_m}x{fine.block_n}; supported are fewer than {_MOST // 3:,}"
            )
        kinds = allocation.empty(shape, dtype=torch.int8, device=device)
        with on_device(kinds):
            classify_blocks_kernel[(kinds.numel() // 3,)](
                kinds_ptr=kinds, seqlens_q_ptr=seqlens_q, seqlens_k_ptr=seqlens_k, H=H, M=M, N=N,
                m_blocks=m_blocks, n_blocks=n_blocks,
                window_left=window[0], window_right=window[1], mask_args=predicate.args,
                BLOCK_M=fine.block_m, BLOCK_N=fine.block_n, PREDICATE=predicate.function,
            )  # fmt: skip
        some, of_rows, of_keys = kinds.bool().unbind(4)
        return BlockMaps(
            forward=_ordered(_lists(some, of_rows, fine, config.forward), H, M, config.forward),
            dkdv=_ordered(
                _lists(some.mT, of_keys.mT, _turned(fine), _turned(config.dkdv)),
                Hk, N, _turned(config.dkdv),
            ),
            dq=_ordered(_lists(some, of_rows, fine, config.dq), H, M, config.dq),
        )  # fmt: skip


def _blocks(length: int, largest: int, fine: int) -> int:
    return cdiv(length, largest) * (largest // fine)


def _turned(tile: Tile) -> Tile:
    """Returns the transposed tile, whose rows are keys."""
    return Tile(tile.block_n, tile.block_m)


def _lists(some: torch.Tensor, full: torch.Tensor, fine: Tile, tile: Tile) -> torch.Tensor:
    """Returns one kernel's lists from the classes of the fine tiles, bool (B, H, rows, columns)."""
    rows, columns = tile.block_m // fine.block_m, tile.block_n // fine.block_n
    some, full = (
        x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)) for x in (some, full)
    )  # (B, H, tiles, rows, tiles of the other sequence, columns)
    some, full = some.any(5).any(3), full.all(5).all(3)
    # equivalent: Any number above 1 sorts hidden tiles behind the others.
    kind = torch.where(some, full, 2)
    counts = torch.stack([(kind == 0).sum(3), (kind == 1).sum(3)], 3)
    return torch.cat([counts, kind.argsort(stable=True)], 3).to(torch.int32)


def maps_of_blocks(
    blocks: torch.Tensor,
    side: int,
    H: int,
    Hk: int,
    M: int,
    N: int,
    window: tuple[int, int],
    lengths: tuple[torch.Tensor, torch.Tensor],
    config: Config,
    kernels: Collection[str],
) -> BlockMaps:
    """Returns the block maps of a ``block_mask``, without synchronisation.

    Args:
        blocks: Bool (H or 1, ceil(M / side), ceil(N / side)), any strides.
        side: Rows and keys of a block, a multiple of every tile.
        H: Query heads.
        Hk: Key/value heads.
        M: Query rows.
        N: Keys.
        window: (window_left, window_right), both given.
        lengths: int32 (B,) of queries and of keys, on the device.
        config: Complete tile configuration.
        kernels: Fields of ``BlockMaps``: the kernels that will be launched.
    """
    seqlens_q, seqlens_k = lengths
    blocks = blocks.view(torch.int8).expand(H, -1, -1)
    of_rows = (H, blocks, seqlens_q, seqlens_k, M, N, *window, side)
    of_keys = (Hk, blocks.mT, seqlens_k, seqlens_q, N, M, *window[::-1], side)
    asked = BlockMaps(
        forward=(*of_rows, config.forward),
        dkdv=(*of_keys, _turned(config.dkdv)),
        dq=(*of_rows, config.dq),
    )
    return BlockMaps(
        *(
            _map_of_blocks(*of_kernel) if kernel in kernels else None
            for kernel, of_kernel in zip(BlockMaps._fields, asked, strict=True)
        )
    )


def _map_of_blocks(
    heads: int,
    blocks: torch.Tensor,
    seqlens_here: torch.Tensor,
    seqlens_there: torch.Tensor,
    here: int,
    there: int,
    before: int,
    after: int,
    side: int,
    tile: Tile,
) -> BlockMap:
    """Returns one kernel's map; its tile has block_m elements here and block_n there."""
    H = blocks.shape[0]
    tiles = cdiv(here, tile.block_m)
    shape = (len(seqlens_here), H, tiles, 2 + cdiv(there, tile.block_n))
    lists = allocation.empty(shape, dtype=torch.int32, device=blocks.device)
    programs = math.prod(shape[:3])
    if programs:
        with on_device(blocks):
            strides = blocks.stride()
            run(
                block_lists_kernel, (programs,),
                {
                    "lists_ptr": lists, "blocks_ptr": blocks, "seqlens_here_ptr": seqlens_here,
                    "seqlens_there_ptr": seqlens_there, "stride_head": strides[0],
                    "stride_here": strides[1], "stride_there": strides[2], "H": H, "here": here,
                    "there": there, "before": before, "after": after, "side": side,
                    "BLOCK_HERE": tile.block_m, "BLOCK_THERE": tile.block_n, "CHUNK": _CHUNK,
                },
            )  # fmt: skip
    return _ordered(lists, heads, here, tile)


def _ordered(lists: torch.Tensor, heads: int, here: int, tile: Tile) -> BlockMap:
    """Adds the order of programs, which have the tiles of ``heads`` heads or groups, to lists."""
    B, H = lists.shape[:2]
    # Lists may have rows for tiles past the last one.
    tiles = cdiv(here, tile.block_m)
    order = allocation.empty((B, heads, tiles), dtype=torch.int32, device=lists.device)
    if order.numel():
        with on_device(lists):
            strides = lists.stride()
            run(
                lpt_order_kernel, (cdiv(tiles, _CHUNK) * B * heads,),
                {
                    "order_ptr": order, "lists_ptr": lists, "stride_lb": strides[0],
                    "stride_lh": strides[1], "stride_lt": strides[2], "Hk": heads,
                    "G": H // heads, "tiles": tiles,
                    "BLOCK": _CHUNK,
                },
            )  # fmt: skip
    return BlockMap(lists, order)
