"""Ours with the kernels for Hopper, emulated from their sources, in place of the portable ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa_verify.simulator.gluon.emulation import Emulated, load

__all__ = ["MODULES", "emulate", "texts_of"]

# In an order in which they can be imported.
MODULES = ("pipeline", "forward", "backward", "dq")
# So few that programs of what has more tiles take turns.
_PROCESSORS = 4
_KERNELS = ("hopper_forward_kernel", "hopper_backward_kernel", "hopper_dq_kernel")


def texts_of(package: ModuleType) -> dict[str, str]:
    """The sources of the kernels by the names of their modules."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent / "kernels" / "hopper"
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}


def emulate(
    package: ModuleType,
    texts: Mapping[str, str] | None = None,
    accumulator: str = "float32",
    seed: str = "0",
    replace: Callable[[Any, str, Any], None] = setattr,
) -> list[Emulated]:
    """Has calls of a package, ``fa_kernels`` or a copy of it, run there what would run on Hopper.

    Args:
        package: Which; it runs in the repaired interpreter.
        texts: Sources in place of its own.
        accumulator: "float64" has float64 inputs run there, and nothing else.
        seed: Of the order of events.
        replace: Sets an attribute.

    Returns:
        Its kernels: forward, backward, dq.
    """
    hopper = importlib.import_module(f"{package.__name__}.launch.hopper")
    prefix = f"{package.__name__}.kernels.hopper"
    sources = {f"{prefix}.{name}": text for name, text in (texts or texts_of(package)).items()}
    kernels = load(sources, _KERNELS, accumulator, seed, _PROCESSORS)
    replace(hopper, "_kernels", lambda: kernels)
    replace(hopper, "is_there", lambda _device: True)
    replace(hopper, "processors", lambda _device: _PROCESSORS)
    if accumulator == "float64":
        replace(hopper, "takes_shapes", lambda dtype, *_: dtype == torch.float64)
    return kernels
