"""Compiles the launches of Hopper's kernels on a machine that may have no GPU.

``python -m tests.unit.fa_kernels.hopper.hopper_code 128`` prints JSON for each kernel at that
head_dim: its shared memory, the tiles and barriers that share memory with others, the warnings of
ptxas, and the instructions that flush float32 numbers below 2**-126 to zero.
"""

import io
import json
import math
import re
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import triton
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonASTSource

from fa_kernels import flash_attention, flash_attention_varlen
from fa_kernels.launch import hopper, portable
from fa_kernels.validation import arguments

_HOPPER = GPUTarget("cuda", 90, 32)
# PTX version 8.0.
_PTX = 80
_PROCESSORS = 132
# In the compiler's code: a tile or barrier with its shape and dtype, and any other allocation.
# Triton 3.6 gives only the offset of the latter.
_TILE = re.compile(
    r"%(\w+) = ttg\.local_alloc \{allocation\.offset = (\d+)\b.*?memdesc<([\dx]+)x[a-z]+(\d+),"
)
_OTHER = re.compile(r"(?<!alloc \{)allocation\.offset = (\d+) : i32(?:, allocation\.size = (\d+))?")
# In PTX: an instruction that flushes to zero.
_FLUSHES = re.compile(r"\w[\w.]*\.ftz\b[\w.]*")
_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


def _type(x: object, annotation: object) -> str:
    """Triton's name of the type of an argument."""
    if isinstance(x, torch.Tensor):
        return f"*{_DTYPES[x.dtype]}"
    if isinstance(x, int):
        return "i64" if "64" in str(annotation) else "i32"
    block = ", ".join(map(str, x.block_shape))
    return f"tensordesc<{_DTYPES[x.base.dtype]}[{block}],{x.layout!r}>"


def _compiled(kernel, given):
    """Compiles a kernel for the types of these arguments and the constants among them."""
    constants = {x.name for x in kernel.params if x.is_constexpr}
    signature = {
        x.name: "constexpr" if x.is_constexpr else _type(given[x.name], x.annotation)
        for x in kernel.params
    }
    places = {(kernel.arg_names.index(name),): given[name] for name in constants}
    options = {name: x for name, x in given.items() if name not in signature}
    source = GluonASTSource(kernel, signature, constexprs=places)
    # The option changes Triton's cache key, so that code cached without a log is not used.
    return triton.compile(source, target=_HOPPER, options=options | {"ptx_options": "-v"})


def _keep_log(make_cubin):
    """Makes compiled code keep the log of ptxas in its metadata, and so in Triton's cache."""

    def make(self, src, metadata, opt, capability):
        with redirect_stdout(io.StringIO()) as said, knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            cubin = make_cubin(self, src, metadata, opt, capability)
        metadata["ptxas_log"] = said.getvalue()
        return cubin

    return make


def _warnings(log: str) -> list[str]:
    """The warnings in a log of ptxas."""
    # A log of ptxas always reports the registers of a kernel.
    assert re.search(r"Used \d+ registers", log), log
    return re.findall(r"\(C\d+\).*", log)


def _placed(ttgir: str) -> str:
    """A kernel's code after the compiler has allocated shared memory."""
    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(_HOPPER).load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(ttgir)
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    try:
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    except TypeError:
        # Triton 3.6.
        passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, _HOPPER.arch, _PTX)
    manager.run(module, "placed")
    return str(module)


def _shared_with_others(ttgir: str) -> list[str]:
    """Tiles and barriers whose memory the compiler also gives to another allocation.

    Messages to warps and exchanges between warps are short-lived and may share memory.
    """
    code = _placed(ttgir)
    tiles = []
    for name, start, shape, bits in _TILE.findall(code):
        size = math.prod(map(int, shape.split("x"))) * int(bits) // 8
        tiles.append((int(start), int(start) + size, name))
    others = [(int(start), int(start) + int(size or 1), "") for start, size in _OTHER.findall(code)]
    # Messages to warps always have an allocation; without one the pattern no longer matches.
    assert tiles
    assert others
    return [
        tile[2]
        for tile in tiles
        if any(x is not tile and x[0] < tile[1] and tile[0] < x[1] for x in (*tiles, *others))
    ]


def _leaves(*shape: int) -> list[torch.Tensor]:
    """q, k, v."""
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def _described(D: int) -> dict[str, dict[str, object]]:
    """The description of each kernel, by name, passes of the backward, and packing."""
    found = {}
    offsets = {"cu_seqlens_q": (0, 5, 300), "cu_seqlens_k": (0, 200, 300)}
    forms = {
        "": (flash_attention, _leaves(1, 2, 300, D)),
        ", packed": (partial(flash_attention_varlen, **offsets), _leaves(300, 2, D)),
    }
    for (form, (call, leaves)), backward in product(forms.items(), ("one_pass", "two_pass")):

        def run(kernel, _grid, named, kinds, of=f"{backward}{form}"):
            code = _compiled(kernel, named)
            found[f"{kernel.__name__}, {of}"] = {
                "shared": code.metadata.shared, "warnings": _warnings(code.metadata.ptxas_log),
                "with_others": _shared_with_others(code.asm["ttgir"]),
                "flushes": sorted(set(_FLUSHES.findall(code.asm["ptx"]))),
            }  # fmt: skip

        with (
            mock.patch.object(CUDABackend, "make_cubin", _keep_log(CUDABackend.make_cubin)),
            mock.patch.object(arguments, "check_device"),
            mock.patch.object(hopper, "is_there", return_value=True),
            mock.patch.object(hopper, "processors", return_value=_PROCESSORS),
            mock.patch.object(hopper, "run", run),
            # The portable kernels.
            mock.patch.object(portable, "run"),
        ):
            out = call(*leaves, deterministic=backward == "two_pass")
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    return found


if __name__ == "__main__":
    print(json.dumps(_described(int(sys.argv[1]))))
