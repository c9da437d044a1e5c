"""Computes Triton's key of a kernel as a process would that has launched others before; no GPU.

``python -m tests.unit.fa_kernels.launch.key_code`` prints JSON: the key of the forward in a process
that has launched no kernel, and in one that has launched those of the backward.
"""

import json
import subprocess
import sys

from fa_kernels.kernels.portable.bwd_preprocess import bwd_preprocess_kernel
from fa_kernels.kernels.portable.dkdv import dkdv_kernel
from fa_kernels.kernels.portable.forward import forward_kernel
from fa_kernels.runtime.launch_cache import _hash_callees_first


def _key(*kernels: object) -> str:
    for kernel in kernels:
        _hash_callees_first(kernel)
    return kernels[-1].cache_key


def _alone() -> str:
    command = [sys.executable, "-m", "tests.unit.fa_kernels.launch.key_code", "alone"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(_key(forward_kernel))
    else:
        after = _key(bwd_preprocess_kernel, dkdv_kernel, forward_kernel)
        print(json.dumps({"a key": _alone(), "after other kernels": after}))
