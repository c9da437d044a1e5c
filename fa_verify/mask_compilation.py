"""Compile the jit predicate of a mask for a Hopper GPU, on a machine that has none.

Triton's interpreter runs Python, in which a variable changes its type or shape in a branch. The
compiler refuses that. It needs a process without the interpreter: ``python -m
fa_verify.mask_compilation SPEC PROBLEM`` compiles, and exits with 1 if it cannot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from fa_verify.oracles.masks.mask import Mask, shown
from fa_verify.oracles.problem import Problem
from fa_verify.properties.problems.mask_examples import mask_example, small_sizes

__all__ = ["NotCompiled", "compilation_fault"]

_SECONDS = 300
_REFUSED = 1


class NotCompiled(NamedTuple):
    """A mask whose jit predicate does not compile.

    Args:
        problem: The problem: its mask and sizes.
        error: The compiler's message.
    """

    problem: Problem
    error: str

    def __str__(self) -> str:
        message = "\n".join(f"  {line}".rstrip() for line in self.error.strip().splitlines())
        return (
            f"the jit predicate of the mask {shown(self.problem.mask)} does not compile for a "
            f"Hopper GPU\n{message}"
        )


def compilation_fault(spec: str, mask: type[Mask], rng: Random) -> NotCompiled | None:
    """Compile the jit predicate of one mask of a class in another process.

    Args:
        spec: The class as ``path/to/file.py:Name`` or ``package.module:Name``.
        mask: The class.
        rng: The source of random numbers.

    Raises:
        NotImplementedError: The mask has no jit predicate.
        RuntimeError: The process ends in another way than by an error of the compiler.
    """
    sizes = [size for size in small_sizes(mask) if size > 1]
    problem = mask_example(rng, mask, sizes=sizes, entries=1, device="cpu")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="mask-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "fa_verify.mask_compilation", spec, problem.to_json()],
            env=environment | {"TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    if not done.returncode:
        return None
    said, _, error = done.stdout.partition("\n")
    if done.returncode == _REFUSED and said == "compiler":
        return NotCompiled(problem, error)
    if done.returncode == _REFUSED and said == "no predicate":
        raise NotImplementedError(error.strip())
    raise RuntimeError(f"compiling the mask's predicate failed:\n{done.stdout}{done.stderr}")


class _Driver:
    """The driver of a GPU, for compilation alone."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compile(spec: str, text: str) -> int:
    """Compile for the problem of a JSON text, print what fails, and return the exit status."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler.errors import CompilationError
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from fa_verify import mask_forms
    from fa_verify.properties.kernels.loading import load_mask

    load_mask(spec)
    driver.set_active(_Driver())
    run, add_stages = JITFunction.run, CUDABackend.add_stages

    def compile_alone(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    def without_ptxas(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(backend, stages, *rest)
        stages["cubin"] = lambda _ptx, _metadata: b""

    with (
        mock.patch.object(JITFunction, "run", compile_alone),
        mock.patch.object(CUDABackend, "add_stages", without_ptxas),
    ):
        try:
            mask_forms.kernel_faults(Problem.from_json(text))
        except CompilationError as error:
            # The last of a chain points into the predicate.
            reason: BaseException = error
            while isinstance(reason.__cause__, CompilationError):
                reason = reason.__cause__
            print(f"compiler\n{reason}")
            return _REFUSED
        except NotImplementedError as error:
            print(f"no predicate\n{error}")
            return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_compile(*sys.argv[1:]))
