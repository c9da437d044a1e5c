"""Parameters that the decorator of kernels keeps Triton from specialising a compilation on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.kernels.common.jit import kernel  # noqa: E402


# The annotations of this module are postponed: Python keeps them as strings.
def copy(from_ptr, to_ptr, length, BLOCK: tl.constexpr):
    """Copies ``length`` elements."""
    at = tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < length), mask=at < length)


def test_a_constant_is_one_where_annotations_are_postponed(monkeypatch):
    """Triton refuses to compile a kernel that does not specialise on its constants."""
    monkeypatch.setattr(triton, "jit", lambda fn, **options: options)
    assert kernel(copy) == {
        "do_not_specialize": ["length"],
        "do_not_specialize_on_alignment": ["from_ptr", "to_ptr"],
    }


# Compiles a kernel for a Hopper GPU, which need not be there, with arguments of a predicate.
COMPILING = """
import json
import torch
from triton.runtime import driver
from triton.backends.compiler import GPUTarget
from fa_kernels.kernels.portable.classify_blocks import classify_blocks_kernel
from fa_verify.oracles.masks.prefix_lm import PrefixLM

class Compiling:
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)

driver.set_active(Compiling())
function, (offsets, _) = PrefixLM(prefix=5).native(1, 1, 32, 32, "cpu")
lengths = torch.zeros(64, dtype=torch.int32)
hashes = {}
for prefix in (5, 1, 16, 0, -16, 2**33):
    hashes[prefix] = classify_blocks_kernel.warmup(
        lengths.to(torch.int8), lengths, lengths, 1, 32, 32, 2, 2, 64, 64, (offsets, prefix),
        BLOCK_M=16, BLOCK_N=16, PREDICATE=function, grid=(1,),
    ).hash
print(json.dumps(hashes))
"""


def test_the_integers_of_a_predicate_do_not_compile_a_kernel_again(tmp_path):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    hashes = json.loads(done.stdout)
    wide = hashes.pop(str(2**33))
    assert len({*hashes.values()}) == 1
    assert wide not in hashes.values()


def test_other_elements_of_a_tuple_keep_what_they_are_specialised_on():
    from fa_kernels.kernels.common.jit import _general

    kind = ("*i32", "constexpr", ("i32", "u1"), "constexpr", "fp32")
    key = ("D", 1, ("D", None), None, None)
    value = (object(), 1, (16, True), None, 1.0)
    assert _general(kind, key, value) == (
        ("*i32", "i32", ("i32", "u1"), "constexpr", "fp32"),
        ("D", "", ("", None), None, None),
    )
    assert _general((), (), ()) == ((), ())
