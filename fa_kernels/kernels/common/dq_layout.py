"""The layout of the sums of dq that Hopper's backward accumulates.

Sums are stored in the order of the warpgroup's registers. The kernel that reads them runs on any
GPU, so this module is plain Triton.
"""

import triton
import triton.language as tl

__all__ = ["rows_of_blocks"]


@triton.jit
def rows_of_blocks(ptr, first, D: tl.constexpr):
    """Loads 64 rows of D columns from blocks of 64 x 64 in the order of ``add_block``.

    ``first`` is the 64-bit index of the first row; D is 64 or 128.
    """
    numbers = tl.load(tl.multiple_of(ptr + first * D, 16) + tl.arange(0, 64 * D))
    # Blocks, eight columns, warps, rows, pairs of columns, the rows 8 below, columns.
    blocks = tl.reshape(numbers, [D // 64, 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(blocks, [2, 5, 3, 0, 1, 4, 6]), [64, D])
