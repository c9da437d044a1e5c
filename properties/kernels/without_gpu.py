"""Kernels that ask for a GPU or for Triton where there is none."""

from __future__ import annotations

__all__ = ["CANNOT_RUN", "advice", "asks_for_a_gpu"]

# The beginning of a refusal that says nothing about the kernel, by the simulator too.
CANNOT_RUN = "cannot run on a CPU: "

# Parts of the messages of Triton and PyTorch.
_NO_GPU = (
    "active drivers (",
    "Torch not compiled with CUDA enabled",
    "PyTorch was compiled without CUDA support",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)


def advice(error: BaseException) -> str:
    """Return what to do where a kernel raised ``error``; empty unless it lacks a GPU or Triton."""
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return "pip install 'fa-verify[triton]' installs it"
    return asks_for_a_gpu(error)


def asks_for_a_gpu(error: BaseException) -> str:
    """Return what to do where a kernel asks for a GPU, and there is none; empty if it does not."""
    if not any(text in str(error) for text in _NO_GPU):
        return ""
    return "the kernel asks for a GPU, and there is none: take the device of the inputs, q.device"
