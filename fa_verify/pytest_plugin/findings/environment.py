"""Where a run takes place: the device, a name for its folder, and the versions of what matters."""

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
    """The first GPU's name, or the processor's where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        models = []
    return models[0].strip() if models else f"{platform.machine()} CPU"


def slug(name: str) -> str:
    """A device's name as that of a folder: lower case, words and numbers with hyphens between."""
    words = re.sub(r"\((?:r|tm)\)", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9.]+", words)) or "device"


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, torch, Triton, and on a GPU of CUDA, cuDNN and the driver.

    Args:
        packages: Further packages, by the names under which they are installed.
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
    """The driver's version, "unknown" where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (said.stdout.split() or ["unknown"])[0]
