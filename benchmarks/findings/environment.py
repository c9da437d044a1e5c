"""The environment of a run: the device, the name of its folder, and package versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["device_name", "slug", "versions"]


def device_name() -> str:
    """Return the name of the first GPU; without a GPU, of the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        models = []
    return models[0].strip() if models else f"{platform.machine()} CPU"


def slug(name: str) -> str:
    """Return a folder name for a device: lower-case words and numbers joined by hyphens."""
    words = re.sub(r"\((?:r|tm)\)", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9.]+", words)) or "device"


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, torch and Triton; on a GPU also of CUDA, cuDNN and the driver.

    Args:
        packages: Distribution names of further packages.
    """
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    found |= {name: _installed(name) for name in ("triton", *packages)}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        number = torch.backends.cudnn.version() or 0
        found["cuDNN"] = f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
        found["driver"] = _driver()
    return found


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    """Return the driver's version, or "unknown" if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (said.stdout.split() or ["unknown"])[0]
