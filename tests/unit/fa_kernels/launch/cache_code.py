"""Compiles the launches of calls with a cache on a machine that may have no GPU.

``python -m tests.unit.fa_kernels.launch.cache_code`` prints JSON: the bytes of shared memory of
each kernel, by the head dims, the dtype and the form of the cache.
"""

import json
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_kernels import flash_attention_with_kvcache
from fa_kernels.launch import portable
from fa_kernels.validation import arguments

_HOPPER = GPUTarget("cuda", 90, 32)
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


def _shared(kernel, given) -> int:
    """The shared memory of a kernel for the types of these arguments and the constants of them."""
    signature = {
        x.name: "constexpr" if x.is_constexpr else _type(given[x.name], x.annotation)
        for x in kernel.params
    }
    constants = {(place,): given[x.name] for place, x in enumerate(kernel.params) if x.is_constexpr}
    options = {name: x for name, x in given.items() if name not in signature}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=_HOPPER, options=options).metadata.shared


def _described() -> dict[str, int]:
    found = {}
    for D, Dv, dtype, form in _CALLS:
        pages = 1 if form == "contiguous" else 4
        q, k = torch.zeros(1, 16, 1, D, dtype=dtype), torch.zeros(pages, 256, 1, D, dtype=dtype)
        v = k[..., :Dv] if form == "shared" else torch.zeros(pages, 256, 1, Dv, dtype=dtype)
        given = {} if form == "contiguous" else {"page_table": torch.arange(4).int()[None]}

        def run(kernel, _grid, named, kinds=None, of=f"{D}/{Dv} {_DTYPES[dtype]} {form}"):
            found[f"{kernel.__name__} {of}"] = _shared(kernel, named)

        with (
            mock.patch.object(arguments, "check_device"),
            mock.patch.object(portable, "PROGRAMS_IN_TURN", 10**6),
            mock.patch.object(portable, "run", run),
        ):
            flash_attention_with_kvcache(q, k, v, cache_seqlens=(200,), num_splits=2, **given)
    return found


if __name__ == "__main__":
    print(json.dumps(_described(), indent=1))
