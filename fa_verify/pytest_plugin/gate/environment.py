"""Where a run measures: what numbers can be compared within."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import torch

from fa_verify.properties.regression.baseline import Environment

__all__ = ["compiles", "environment_of"]


def environment_of(device: str) -> Environment:
    """Device and versions of this run; ``device`` is "cpu" or "cuda"."""
    has_triton = importlib.util.find_spec("triton") is not None
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"CPU ({platform.machine()})"
        name += ", Triton's interpreter" if has_triton and _interprets() else ""
    triton = importlib.metadata.version("triton") if has_triton else "none"
    return Environment(name, torch.__version__, triton)


def compiles(device: str) -> bool:
    """Whether Triton kernels are compiled for a GPU here."""
    return device == "cuda" and importlib.util.find_spec("triton") is not None and not _interprets()


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
