"""A copy by the acts that all kernels share, compiled for a GPU that need not be there.

``python -m tests.unit.aligned_copy`` prints the widths of its accesses, as JSON.
"""

import collections
import json
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_kernels.kernels.tiles import load_tile, store_rows, whole_rows

__all__ = ["accesses"]

_ACCESS = re.compile(r"\b(ld|st)\.global\S*?((?:\.v[248])?\.[bfsu]\d+)\b")
_HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit
def copy_kernel(
    out_ptr, sums_ptr, in_ptr, stride, rows, D, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):
    """One tile of one head, and a second one to which it is added."""
    start = tl.program_id(0) * 64
    first = tl.program_id(1).to(tl.int64) * rows
    offs_tile = tl.arange(0, 64)
    offs_d = tl.arange(0, BLOCK_D)
    matrix = (in_ptr + first * stride, stride, 1, D)
    inside = start + offs_tile[:, None] < rows
    tile = load_tile(matrix, start, offs_tile[:, None], offs_d[None, :], inside, ALIGNED, True)
    if ALIGNED == 2:
        tile += tl.load(whole_rows(sums_ptr, first, start + offs_tile, offs_d, BLOCK_D))
    store_rows(out_ptr, first, rows, start + offs_tile, offs_d, tile, D, BLOCK_D, ALIGNED)


def accesses(ptx: str) -> dict[str, int]:
    """How often PTX reads and writes global memory, by kind and width."""
    return dict(collections.Counter("".join(match.groups()) for match in _ACCESS.finditer(ptx)))


def _compiled(aligned: int) -> dict[str, int]:
    signature = {
        "out_ptr": "*bf16", "sums_ptr": "*fp32", "in_ptr": "*bf16", "stride": "i64", "rows": "i32",
        "D": "i32", "BLOCK_D": "constexpr", "ALIGNED": "constexpr",
    }  # fmt: skip
    source = ASTSource(copy_kernel, signature, constexprs={(6,): 128, (7,): aligned})
    return accesses(triton.compile(source, target=_HOPPER, options={"num_warps": 4}).asm["ptx"])


if __name__ == "__main__":
    print(json.dumps({str(aligned): _compiled(aligned) for aligned in range(3)}))
