"""Kernels that copy tiles by the shared load and store helpers, compiled for a GPU on any machine.

``python -m tests.unit.fa_kernels.launch.aligned_copy`` prints the widths of accesses as JSON.
"""

import collections
import json
import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fa_kernels.kernels.common.addressing import Matrix, load_tile, store_rows, whole_rows
from fa_kernels.kernels.common.dq_layout import rows_of_blocks
from fa_kernels.kernels.hopper.pipeline import add_block
from fa_kernels.kernels.portable.bwd_preprocess import bwd_preprocess_kernel
from tests.unit.fa_kernels.launch.cache_code import compiled

__all__ = ["accesses"]

_ACCESS = re.compile(
    r"\b(?:(ld|st)\.global\S*?|(?:atom|red)\.global\S*?\.(add))((?:\.v[248])?\.[bfsu]\d+)\b"
)
_HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit
def copy_kernel(
    out_ptr, sums_ptr, in_ptr, stride, rows, D, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copies a tile of one head and adds it to a second tile."""
    start = tl.program_id(0) * 64
    first = tl.program_id(1).to(tl.int64) * rows
    offs_tile = tl.arange(0, 64)
    offs_d = tl.arange(0, BLOCK_D)
    matrix = Matrix(in_ptr + first * stride, stride, 1, D)
    inside = start + offs_tile[:, None] < rows
    tile = load_tile(matrix, start, offs_tile[:, None], offs_d[None, :], inside, ALIGNED, True)
    if ALIGNED:
        tile += tl.load(whole_rows(sums_ptr, first, start + offs_tile, offs_d, BLOCK_D))
    store_rows(out_ptr, first, rows, start + offs_tile, offs_d, tile, D, ALIGNED)


@triton.jit
def rows_kernel(out_ptr, in_ptr, D: tl.constexpr):
    """Copies 64 rows in blocks to contiguous rows."""
    first = tl.program_id(0).to(tl.int64) * 64
    places = whole_rows(out_ptr, first, tl.arange(0, 64), tl.arange(0, D), D)
    tl.store(places, rows_of_blocks(in_ptr, first, D))


@gluon.jit
def blocks_kernel(out_ptr, D: gl.constexpr):
    """Adds ones to the second of two blocks."""
    first = gl.program_id(0).to(gl.int64) * 64
    block = gl.full(
        [64, 64], 1.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    )
    add_block(out_ptr, first, D, 1, block)


def accesses(ptx: str) -> dict[str, int]:
    """Counts of the accesses of PTX to global memory, by kind and width."""
    found = ("".join(filter(None, match.groups())) for match in _ACCESS.finditer(ptx))
    return dict(collections.Counter(found))


def _compiled(source: ASTSource) -> dict[str, int]:
    return accesses(triton.compile(source, target=_HOPPER, options={"num_warps": 4}).asm["ptx"])


def _copy(aligned: int) -> ASTSource:
    signature = {
        "out_ptr": "*bf16", "sums_ptr": "*fp32", "in_ptr": "*bf16", "stride": "i64", "rows": "i32",
        "D": "i32", "BLOCK_D": "constexpr", "ALIGNED": "constexpr",
    }  # fmt: skip
    return ASTSource(copy_kernel, signature, constexprs={(6,): 128, (7,): aligned})


def _rows() -> ASTSource:
    signature = {"out_ptr": "*fp32", "in_ptr": "*fp32", "D": "constexpr"}
    return ASTSource(rows_kernel, signature, constexprs={(2,): 128})


def _blocks() -> ASTSource:
    return GluonASTSource(
        blocks_kernel, {"out_ptr": "*fp32", "D": "constexpr"}, constexprs={(1,): 128}
    )


def _zeros() -> dict[str, int]:
    """The stores of the kernel that zeroes the sums of dq."""
    given = {
        "BLOCK_M": 32, "BLOCK_DV": 64, "ACC": tl.float32, "ALIGNED": 0, "ROW_PADDING": 256,
        "VARLEN": False, "seqlens_q_ptr": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    for x in bwd_preprocess_kernel.params:
        given.setdefault(x.name, torch.zeros(1) if x.name.endswith("_ptr") else 1)
    found = accesses(compiled(bwd_preprocess_kernel, given, _HOPPER).asm["ptx"])
    return {width: count for width, count in found.items() if width.startswith("st")}


if __name__ == "__main__":
    sources = {str(aligned): _copy(aligned) for aligned in range(2)}
    sources |= {"rows": _rows(), "blocks": _blocks()}
    found = {name: _compiled(source) for name, source in sources.items()}
    print(json.dumps(found | {"zeros": _zeros()}))
