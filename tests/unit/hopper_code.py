"""Code of the kernels for Hopper as calls launch them, compiled for a GPU that need not be there.

``python -m tests.unit.hopper_code 128`` prints of each kernel at that head_dim, as JSON, how much
shared memory it takes and what ptxas warns of.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from fa_kernels import arguments, flash_attention, hopper, launch

_HOPPER = GPUTarget("cuda", 90, 32)
_PROCESSORS = 132
_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


def _type(x: object, annotation: object) -> str:
    """What Triton calls the type of an argument."""
    if isinstance(x, torch.Tensor):
        return f"*{_DTYPES[x.dtype]}"
    if isinstance(x, int):
        return "i64" if "64" in str(annotation) else "i32"
    block = ", ".join(map(str, x.block_shape))
    return f"tensordesc<{_DTYPES[x.base.dtype]}[{block}],{x.layout!r}>"


def _compiled(kernel, args, constants):
    """A kernel for the types of these arguments and these constants."""
    annotations = [x.annotation for x in inspect.signature(kernel.fn).parameters.values()]
    names = kernel.arg_names
    signature = {
        name: _type(x, annotation)
        for name, x, annotation in zip(names, args, annotations, strict=False)
    } | dict.fromkeys(names[len(args) :], "constexpr")
    given = {(names.index(name),): x for name, x in constants.items() if name in names}
    options = {name: x for name, x in constants.items() if name not in names}
    source = GluonASTSource(kernel, signature, constexprs=given)
    return triton.compile(source, target=_HOPPER, options=options)


def _warnings(ptx: str) -> list[str]:
    """Those of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        done = subprocess.run(
            [get_ptxas(_HOPPER.arch).path, "-v", "-arch=sm_90a", path, "-o", f"{path}.cubin"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return re.findall(r"\(C\d+\).*", done.stderr)


def _described(D: int) -> dict[str, dict[str, object]]:
    """By kernel, and passes of the backward."""
    found = {}
    leaves = [torch.zeros(1, 2, 300, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for backward in ("one_pass", "two_pass"):

        def run(kernel, _grid, *args, kinds, backward=backward, **constants):
            code = _compiled(kernel, args, constants)
            found[f"{kernel.__name__}, {backward}"] = {
                "shared": code.metadata.shared, "warnings": _warnings(code.asm["ptx"]),
            }  # fmt: skip

        with (
            mock.patch.object(arguments, "check_device"),
            mock.patch.object(hopper, "is_there", return_value=True),
            mock.patch.object(hopper, "processors", return_value=_PROCESSORS),
            mock.patch.object(hopper, "run", run),
            # Those of any GPU.
            mock.patch.object(launch, "run"),
        ):
            out = flash_attention(*leaves, backward=backward)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    return found


if __name__ == "__main__":
    print(json.dumps(_described(int(sys.argv[1]))))
