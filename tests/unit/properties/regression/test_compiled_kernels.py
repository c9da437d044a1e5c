"""Registers, spills and shared memory: names of kernels, and rises that raise an alarm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fa_verify.properties.regression import compiled_kernels
from fa_verify.properties.regression.compiled_kernels import (
    Resources,
    loaded_kernels,
    moved_kernels,
    name_of,
)

THEN = {"f": Resources(100, 8, 1000)}


@pytest.mark.parametrize(
    ("now", "says", "alarm"),
    [
        (Resources(100, 8, 1000), None, None),
        (Resources(110, 8, 1000), "f: registers 100 -> 110", False),
        (Resources(111, 8, 1000), "f: registers 100 -> 111", True),
        (Resources(100, 9, 1000), "f: spills 8 -> 9", True),
        (Resources(100, 0, 1000), "f: spills 8 -> 0", False),
        (Resources(100, 8, 1100), "f: shared 1000 -> 1100", False),
        (Resources(100, 8, 1101), "f: shared 1000 -> 1101", True),
        (Resources(90, 8, 2000), "f: registers 100 -> 90, shared 1000 -> 2000", True),
    ],
)
def test_spills_and_rises_beyond_a_tenth_are_alarms(now, says, alarm):
    changes = list(moved_kernels(THEN, {"f": now}))
    assert [(x.text, x.alarm) for x in changes] == ([] if says is None else [(says, alarm)])


def test_kernels_that_come_and_go_are_told_and_a_new_one_that_spills_is_an_alarm():
    now = {"g": Resources(10, 0, 0), "h": Resources(10, 4, 0)}
    assert [(x.text, x.alarm) for x in moved_kernels(THEN, now)] == [
        ("f: no longer compiled (100 registers, 8 spills, 1000 B shared)", False),
        ("g: new (10 registers, 0 spills, 0 B shared)", False),
        ("h: new (10 registers, 4 spills, 0 B shared)", True),
    ]


def kernel(**of_source):
    fn = SimpleNamespace(arg_names=["q_ptr", "lse_ptr", "M", "BLOCK_M", "ACC"])
    source = SimpleNamespace(
        fn=fn,
        signature={"q_ptr": "*bf16", "lse_ptr": "*fp32", "M": "i32", "BLOCK_M": "constexpr"},
        constants={(4,): SimpleNamespace(__name__="float32"), (3,): 64},
    )
    vars(source).update(of_source)
    return SimpleNamespace(
        name="forward_kernel", src=source, module=None, metadata=SimpleNamespace(shared=4096)
    )


def test_a_kernel_is_named_by_function_pointers_and_constexprs():
    assert name_of(kernel()) == "forward_kernel(bf16 fp32) BLOCK_M=64 ACC=float32"


def test_a_kernel_that_is_no_function_of_triton_has_a_name_too():
    assert name_of(SimpleNamespace(name="f", src=SimpleNamespace())) == "f()"


def test_what_a_process_loads_is_noted_once_it_is_known(monkeypatch):
    compiler = pytest.importorskip("triton.compiler")

    def load(self):
        if self.module is None:
            self.module, self.n_regs, self.n_spills = "loaded", 100 + self.extra, 2

    monkeypatch.setattr(compiler.CompiledKernel, "_init_handles", load)
    compiled_kernels.loaded_kernels.cache_clear()
    found = loaded_kernels()
    assert found is loaded_kernels()
    for extra in (5, 0):
        loading = kernel()
        loading.extra = extra
        for _ in range(2):
            compiler.CompiledKernel._init_handles(loading)
    # For two variants of one name the larger numbers count.
    assert found == {"forward_kernel(bf16 fp32) BLOCK_M=64 ACC=float32": Resources(105, 2, 4096)}
    compiled_kernels.loaded_kernels.cache_clear()
