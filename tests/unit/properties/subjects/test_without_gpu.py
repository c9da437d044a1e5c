"""Kernels that ask for a GPU where there is none get advice."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from fa_verify import verify
from fa_verify.oracles.problem import Problem
from fa_verify.properties.subjects.loading import load
from fa_verify.properties.subjects.without_gpu import advice

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

CONFIGS = [triton.Config({"BLOCK": width}) for width in (16, 32)]


@triton.jit
def copy(source, target, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < N), mask=i < N)


def copies(configs):
    """A subject whose out is v for a single key."""
    kernel = triton.autotune(configs, key=["N"])(copy)

    def attention(q, k, v, *, mask, sm_scale):
        out = torch.empty_like(v)
        kernel[lambda meta: (triton.cdiv(v.numel(), meta["BLOCK"]),)](
            v.contiguous(), out, v.numel()
        )
        return out

    attention.backward = False
    return attention


@pytest.fixture
def no_gpu(monkeypatch):
    """Triton as on a machine without a GPU."""
    module = importlib.import_module("triton.runtime.driver")
    monkeypatch.setattr(module, "backends", {})
    for name in ("_default", "_active"):
        monkeypatch.setattr(module.driver, name, None)


def test_an_autotuned_kernel_is_told_to_keep_one_configuration(no_gpu):
    report = verify(copies(CONFIGS), problems=[Problem()], guarantees=("G1",))
    assert not report
    assert "active drivers" in str(report)
    assert "configs[:1] if triton.knobs.runtime.interpret else configs" in str(report)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a compiled kernel needs a GPU")
def test_one_configuration_needs_no_gpu(no_gpu):
    assert verify(copies(CONFIGS[:1]), problems=[Problem()], guarantees=("G1",))


def test_a_device_at_import_is_told_to_come_from_the_inputs(no_gpu, tmp_path):
    path = tmp_path / "device_at_import.py"
    path.write_text(
        "import triton\nDEVICE = triton.runtime.driver.active.get_active_torch_device()\n"
    )
    with pytest.raises(ValueError, match=r"the kernel asks for a GPU, .* of the inputs, q\.device"):
        load(f"{path}:attention")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers")
def test_pytorch_without_a_gpu_is_recognised():
    with pytest.raises((AssertionError, RuntimeError)) as info:
        torch.cuda.get_device_properties(0)
    assert "q.device" in advice(info.value)


def test_a_kernel_that_lacks_triton_is_told_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    path = tmp_path / "needs_triton.py"
    path.write_text("import triton\n")
    with pytest.raises(ValueError, match=r"pip install 'fa-verify\[triton\]' installs it$"):
        load(f"{path}:attention")


def test_other_errors_get_no_advice():
    assert advice(ModuleNotFoundError("No module named 'other'", name="other")) == ""
    assert advice(ValueError("N must be even")) == ""
