"""Sums of dq as Hopper's backward adds to them: in the order in which its threads have them.

What reads them is compiled for any GPU, and so knows nothing of Gluon.
"""

import triton
import triton.language as tl

__all__ = ["rows_of_blocks"]


@triton.jit
def rows_of_blocks(ptr, first, D: tl.constexpr):
    """64 rows of D columns, out of blocks of 64 x 64 that lie in the order of ``add_block``.

    ``first`` is the first one's row, a 64-bit number; D is 64 or 128.
    """
    numbers = tl.load(tl.multiple_of(ptr + first * D, 16) + tl.arange(0, 64 * D))
    # Blocks, eight columns, warps, rows, pairs of columns, the rows 8 below, columns.
    blocks = tl.reshape(numbers, [D // 64, 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(blocks, [2, 5, 3, 0, 1, 4, 6]), [64, D])
