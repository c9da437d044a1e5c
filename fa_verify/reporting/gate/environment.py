"""The environment of a run. Numbers of a baseline are comparable only within one environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import torch

from fa_verify.properties.regression.baseline import Environment

__all__ = ["compiles", "environment_of"]


def environment_of(device: str) -> Environment:
    """Return the name of the device ("cpu" or "cuda") and the versions of torch and Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"CPU ({platform.machine()})"
        name += ", Triton's interpreter" if has_triton and _interprets() else ""
    triton = importlib.metadata.version("triton") if has_triton else "none"
    return Environment(name, torch.__version__, triton)


def compiles(device: str) -> bool:
    """Return whether Triton kernels are compiled for a GPU, not interpreted."""
    return device == "cuda" and importlib.util.find_spec("triton") is not None and not _interprets()


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
