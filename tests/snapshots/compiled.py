"""Compiles the kernels' launches for a Hopper GPU, on a machine that may have none.

``python -m tests.snapshots.compiled`` prints digests as JSON. It needs a process of its own without
Triton's interpreter, started with ``environment``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

__all__ = ["compiled"]

_PROCESSORS = 132


def compiled(only: str = "") -> dict[str, Any]:
    """Digests of each launch's code, by problem and number of the launch.

    "ir" is Triton's intermediate code, "flow" its data flow regardless of order, "ptx" the input of
    the GPU's driver. "kernel" is the kernel's name; the entry "triton" is Triton's version.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.snapshots.compiled", only],
            env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return json.loads(done.stdout)


class _Driver:
    """A stub of the driver of a GPU, for compilation only."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _Launches:
    """Compiles kernels in place of launching them, and keeps digests of the code."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.run = JITFunction.run
        self.found: list[dict[str, str]] = []
        self.digests: dict[int, tuple[Any, dict[str, str]]] = {}

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> _Code:
        code = self.run(kernel, *args, grid=grid, warmup=True, **options)
        if id(code) not in self.digests:
            self.digests[id(code)] = code, _digests(kernel.__name__, code.asm)
        return _Code(self, self.digests[id(code)][1])


class _Code:
    """Compiled code; its creation and every further launch are counted as launches."""

    def __init__(self, launches: _Launches, digests: dict[str, str]) -> None:
        self.launches, self.digests = launches, digests
        launches.found.append(digests)

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_args, **_options: self.launches.found.append(self.digests)


def _digests(name: str, asm: Any) -> dict[str, str]:
    from tests.snapshots.normalising import flow_of, plain_ir, plain_ptx, sha

    # Gluon has no TTIR. TTGIR is its first code with inlined functions.
    ir = asm["ttir"] if "ttir" in asm else asm["ttgir"]
    return {
        "kernel": name, "ir": sha(plain_ir(ir)), "flow": sha(flow_of(ir)),
        "ptx": sha(plain_ptx(asm["ptx"])),
    }  # fmt: skip


@contextmanager
def _for_hopper(launches: _Launches, *, its_own: bool) -> Iterator[None]:
    """Makes launches on a CPU compile for Hopper: portable kernels, or Hopper's own."""
    import torch
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from fa_kernels.launch import hopper
    from fa_kernels.validation import arguments

    driver.set_active(_Driver())
    add_stages = CUDABackend.add_stages

    def without_ptxas(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(backend, stages, *rest)
        stages["cubin"] = lambda _ptx, _metadata: b""

    with ExitStack() as stack:
        for of, name, value in (
            (CUDABackend, "add_stages", without_ptxas),
            (JITFunction, "run", lambda *args, **options: launches.launch(*args, **options)),
            (torch.cuda, "current_device", lambda: 0),
            (arguments, "check_device", lambda *_: None),
            (hopper, "is_there", lambda _device: its_own),
            (hopper, "processors", lambda _device: _PROCESSORS),
        ):
            stack.enter_context(mock.patch.object(of, name, value))
        yield


def _described(only: str) -> dict[str, Any]:
    import triton

    from tests.snapshots.calls import Inputs, answer
    from tests.snapshots.launches import launches

    of = _Launches()
    found: dict[str, Any] = {"triton": triton.__version__}
    for case in launches():
        if only not in case.key:
            continue
        before = len(of.found)
        with _for_hopper(of, its_own=case.hopper):
            answer(Inputs(case, "cpu"))
        for place, digests in enumerate(of.found[before:], 1):
            found[f"{case.key}, launch {place}"] = digests
    return found


if __name__ == "__main__":
    print(json.dumps(_described(*sys.argv[1:])))
