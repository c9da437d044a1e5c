"""Compiles the portable kernels of wide heads for a GPU with 99 KiB of shared memory a program.

``python -m tests.unit.fa_kernels.launch.tile_code`` prints JSON: the bytes of shared memory of each
kernel, by its name and whether it computes dq by atomics. It needs no GPU.
"""

import json
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from fa_kernels import flash_attention
from fa_kernels.launch import portable
from fa_kernels.validation import arguments
from tests.unit.fa_kernels.launch.cache_code import compiled

_ADA = GPUTarget("cuda", 89, 32)


def _described() -> dict[str, int]:
    found = {}

    def run(kernel, _grid, named, kinds=None):
        if "process" not in kernel.__name__:
            name = f"{kernel.__name__} {'by atomics' * named.get('ONE_PASS', False)}"
            found[name.strip()] = compiled(kernel, named, _ADA).metadata.shared

    with (
        mock.patch.object(arguments, "check_device"),
        mock.patch.object(portable, "run", run),
    ):
        for deterministic in (True, False):
            leaves = [
                torch.zeros(1, 1, 128, 256, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            ]
            flash_attention(*leaves, deterministic=deterministic).sum().backward()
    return found


if __name__ == "__main__":
    print(json.dumps(_described(), indent=1))
