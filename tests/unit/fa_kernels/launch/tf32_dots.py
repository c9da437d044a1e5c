"""Dots in TF32, compiled for a GPU on any machine.

``python -m tests.unit.fa_kernels.launch.tf32_dots`` prints the instructions that compute them or
convert their operands, by GPU and number of rows, as JSON.
"""

import json
import re
from itertools import product

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["instructions"]

_OF_TF32 = re.compile(r"^\s*(?:@\S+\s+)?(\w+)\.\S*tf32", re.MULTILINE)
# Compute capabilities of an A100, an H100 or H200, and a B200.
_GPUS = (80, 90, 100)


@triton.jit
def dot_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr):
    """Multiplies (M, 32) by (32, 64)."""
    rows, inner, columns = tl.arange(0, M)[:, None], tl.arange(0, 32), tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + rows * 32 + inner[None, :])
    y = tl.load(y_ptr + inner[:, None] * 64 + columns)
    tl.store(out_ptr + rows * 64 + columns, tl.dot(x, y, input_precision="tf32"))


def instructions(ptx: str) -> list[str]:
    """The names of the instructions of PTX whose types hold "tf32"."""
    return sorted({*_OF_TF32.findall(ptx)})


def _compiled(gpu: int, M: int) -> list[str]:
    signature = {**dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32"), "M": "constexpr"}
    source = ASTSource(dot_kernel, signature, constexprs={(3,): M})
    return instructions(triton.compile(source, target=GPUTarget("cuda", gpu, 32)).asm["ptx"])


if __name__ == "__main__":
    found = {f"sm_{gpu}, {M} rows": _compiled(gpu, M) for gpu, M in product(_GPUS, (16, 64))}
    print(json.dumps(found))
