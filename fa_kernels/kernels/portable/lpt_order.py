"""The order of the programs for the tiles of a head: longest processing time first (LPT).

A GPU starts programs in order, each when another one ends. If some programs take several times as
long as others, the last ones to start should be short.

Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies, the LPT rule.
"""

import triton
import triton.language as tl

from fa_kernels.kernels.common.block_info import BlockLists
from fa_kernels.kernels.common.jit import kernel

__all__ = ["lpt_order_kernel"]


@triton.jit
def _visited(lists, b, h_k, tile, tiles, G):
    """Returns the tiles that a group of heads visits, summed over heads; 0 past the last tile."""
    visited = tl.zeros(tile.shape, tl.int32)
    for g in range(0, G):
        row = lists.ptr + (
            b * lists.stride_entry + (h_k * G + g) * lists.stride_head + tile * lists.stride_tile
        )
        visited += tl.load(row, mask=tile < tiles, other=0)
        visited += tl.load(row + 1, mask=tile < tiles, other=0)
    return visited


@kernel
def lpt_order_kernel(
    order_ptr,
    lists_ptr,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_lt: tl.int64,
    Hk: tl.int32,
    G: tl.int32,
    tiles: tl.int32,
    BLOCK: tl.constexpr,
):
    """Writes order (B,Hk,tiles), contiguous: the tiles of a group of G heads, longest first.

    The length of a tile is the number of tiles it visits; ties are ordered by index. Each program
    computes the places of BLOCK tiles.
    """
    lists = BlockLists(lists_ptr, stride_lb, stride_lh, stride_lt)
    chunks = tl.cdiv(tiles, BLOCK)
    chunk = tl.program_id(0) % chunks
    bh_k = tl.program_id(0) // chunks
    b = bh_k // Hk
    h_k = bh_k % Hk
    here = chunk * BLOCK + tl.arange(0, BLOCK)
    visited = _visited(lists, b, h_k, here, tiles, G)[:, None]
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tiles, BLOCK):
        there = first + tl.arange(0, BLOCK)
        other = _visited(lists, b, h_k, there, tiles, G)
        other = other[None, :]
        is_before = (other > visited) | ((other == visited) & (there[None, :] < here[:, None]))
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + (bh_k.to(tl.int64) * tiles + place), here, mask=here < tiles)
