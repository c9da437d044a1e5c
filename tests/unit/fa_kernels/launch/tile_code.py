"""Compiles portable kernels with their default tiles; it needs no GPU.

``python -m tests.unit.fa_kernels.launch.tile_code`` prints JSON. "shared" has the bytes of shared
memory of each kernel of wide heads on a GPU that gives a program 99 KiB. Its keys are the kernel's
name and whether it computes dq by atomics. "local" has the bytes of local memory of a thread of
fp32 forwards on Hopper, by the head dim.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from fa_kernels import flash_attention
from fa_kernels.launch import portable
from fa_kernels.validation import arguments
from tests.unit.fa_kernels.launch.cache_code import HOPPER, compiled

_ADA = GPUTarget("cuda", 89, 32)
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def _local(code: triton.compiler.CompiledKernel) -> int:
    """The bytes of local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (size,) = re.findall(r"STACK:(\d+)", told)
    return int(size)


def _described() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"shared": {}, "local": {}}

    def run(kernel, _grid, named, kinds=None):
        if kernel.__name__ == "forward_kernel" and named["q_ptr"].dtype == torch.float32:
            found["local"][str(named["q_ptr"].shape[3])] = _local(compiled(kernel, named, HOPPER))
        elif "process" not in kernel.__name__:
            name = f"{kernel.__name__} {'by atomics' * named.get('ONE_PASS', False)}"
            found["shared"][name.strip()] = compiled(kernel, named, _ADA).metadata.shared

    with (
        mock.patch.object(arguments, "check_device"),
        mock.patch.object(portable, "run", run),
    ):
        for D in (64, 128):
            flash_attention(*(torch.zeros(1, 1, 128, D) for _ in range(3)))
        for deterministic in (True, False):
            leaves = [
                torch.zeros(1, 1, 128, 256, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            ]
            flash_attention(*leaves, deterministic=deterministic).sum().backward()
    return found


if __name__ == "__main__":
    print(json.dumps(_described(), indent=1))
