"""Compiles the launches of calls with a cache on a machine that may have no GPU.

``python -m tests.unit.fa_kernels.launch.cache_code`` prints JSON: the bytes of shared memory of
each kernel, by the head dims, the dtype and the form of the cache. With ``float64`` it prints, of
each kernel of a float64 call with a softcap, the numbers of two kinds of instructions.
"""

import json
import math
import struct
import sys
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_kernels import flash_attention_with_kvcache
from fa_kernels.launch import portable
from fa_kernels.validation import arguments

HOPPER = GPUTarget("cuda", 90, 32)
_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32",
}  # fmt: skip
# D, Dv, dtype, and the form of the cache.
_CALLS = (
    (128, 128, torch.bfloat16, "paged"), (256, 256, torch.float16, "paged"),
    (256, 256, torch.float32, "contiguous"), (192, 128, torch.bfloat16, "shared"),
    (192, 128, torch.bfloat16, "paged"), (576, 512, torch.bfloat16, "shared"),
    (576, 512, torch.bfloat16, "paged"), (576, 512, torch.float32, "paged"),
)  # fmt: skip


def _type(x: object, annotation: object) -> str:
    """Triton's name of the type of an argument."""
    if isinstance(x, torch.Tensor):
        return f"*{_DTYPES[x.dtype]}"
    return "i64" if "64" in str(annotation) else "i32"


def compiled(kernel, given, target=HOPPER):
    """A kernel for the types of these arguments and the constants of them."""
    signature = {
        x.name: "constexpr" if x.is_constexpr else _type(given[x.name], x.annotation)
        for x in kernel.params
    }
    constants = {(place,): given[x.name] for place, x in enumerate(kernel.params) if x.is_constexpr}
    options = {name: x for name, x in given.items() if name not in signature}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=target, options=options)


def _described() -> dict[str, int]:
    found = {}
    for D, Dv, dtype, form in _CALLS:
        pages = 1 if form == "contiguous" else 4
        q, k = torch.zeros(1, 16, 1, D, dtype=dtype), torch.zeros(pages, 256, 1, D, dtype=dtype)
        v = k[..., :Dv] if form == "shared" else torch.zeros(pages, 256, 1, Dv, dtype=dtype)
        given = {} if form == "contiguous" else {"page_table": torch.arange(4).int()[None]}

        def run(kernel, _grid, named, kinds=None, of=f"{D}/{Dv} {_DTYPES[dtype]} {form}"):
            found[f"{kernel.__name__} {of}"] = compiled(kernel, named).metadata.shared

        _call(run, q, k, v, cache_seqlens=(200,), num_splits=2, **given)
    return found


def _call(run, *tensors, **options) -> None:
    """Call the function with a function in place of that which launches kernels."""
    with (
        mock.patch.object(arguments, "check_device"),
        mock.patch.object(portable, "PROGRAMS_IN_TURN", 10**6),
        mock.patch.object(portable, "run", run),
    ):
        flash_attention_with_kvcache(*tensors, **options)


def _in_float64() -> dict[str, dict[str, int]]:
    """The instructions that scale the exponent of a softcap, and those that may be fused.

    The exponent is multiplied by -2 log2(e). The assembler fuses no instruction with a rounding.
    """
    found = {}
    constant = "0d" + struct.pack(">d", -2 / math.log(2)).hex().upper()

    def run(kernel, _grid, named, kinds=None):
        code = [x for x in compiled(kernel, named).asm["ptx"].splitlines() if x.strip()]
        found[kernel.__name__] = {
            "scalings": sum(constant in x for x in code),
            "fusible": sum(x.split()[0] in ("add.f64", "mul.f64", "sub.f64") for x in code),
        }

    q = torch.zeros(2, 2, 17, 16, dtype=torch.float64)
    k, v = (torch.zeros(2, 64, 2, 16, dtype=torch.float64) for _ in range(2))
    _call(run, q, k, v, cache_seqlens=(64, 2), softcap=0.5, config="16x32", num_splits=2)
    return found


if __name__ == "__main__":
    print(json.dumps(_in_float64() if "float64" in sys.argv else _described(), indent=1))
