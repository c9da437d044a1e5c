"""Advice for kernels that ask for a GPU or for Triton where there is none."""

from __future__ import annotations

__all__ = ["advice"]

# Parts of the messages of Triton and PyTorch.
_NO_GPU = (
    "active drivers (",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)


def advice(error: BaseException) -> str:
    """Return what to do where a kernel raised ``error``; empty unless it lacks a GPU or Triton."""
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return "pip install 'fa-verify[triton]' installs it"
    if not any(text in str(error) for text in _NO_GPU):
        return ""
    return "the kernel asks for a GPU, and there is none: take the device of the inputs, q.device"
