"""Kernels that ask for a GPU where there is none get advice."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.without_gpu import advice

triton = pytest.importorskip("triton")


@pytest.fixture
def no_gpu(monkeypatch):
    """Triton as on a machine without a GPU."""
    module = importlib.import_module("triton.runtime.driver")
    monkeypatch.setattr(module, "backends", {})
    for name in ("_default", "_active"):
        monkeypatch.setattr(module.driver, name, None)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter stands in for a GPU")
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
