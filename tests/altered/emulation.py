"""Run the project's Hopper kernels, emulated on a CPU, instead of the portable kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa_verify.simulator.gluon.emulation import Emulated, load

__all__ = ["MODULES", "PROCESSORS", "emulate", "texts_of"]

# The modules of the kernels, in an order in which they can be imported.
MODULES = ("pipeline", "forward", "backward", "dq")
# Few enough for the programs of a problem with more tiles to take turns.
PROCESSORS = 4
_KERNELS = ("hopper_forward_kernel", "hopper_backward_kernel", "hopper_dq_kernel")


def texts_of(package: ModuleType) -> dict[str, str]:
    """Return the sources of a package's Hopper kernels by the names of their modules."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent / "kernels" / "hopper"
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}


def emulate(
    package: ModuleType,
    texts: Mapping[str, str] | None = None,
    accumulator: str = "float32",
    seed: str = "0",
    replace: Callable[[Any, str, Any], None] = setattr,
    places: int = PROCESSORS,
) -> list[Emulated]:
    """Make calls of ``fa_kernels``, or of a copy of it, run the emulated Hopper kernels.

    Args:
        package: The package, which runs in the repaired interpreter.
        texts: Sources by the names of modules, instead of the package's own.
        accumulator: "float32"; or "float64", with which only float64 inputs run on these kernels.
        seed: Seed of the order of events.
        replace: Function that sets an attribute.
        places: Programs that run at a time. The host counts on more, where other kernels compete.

    Returns:
        The kernels: forward, backward, dq.
    """
    hopper = importlib.import_module(f"{package.__name__}.launch.hopper")
    prefix = f"{package.__name__}.kernels.hopper"
    sources = {f"{prefix}.{name}": text for name, text in (texts or texts_of(package)).items()}
    kernels = load(sources, _KERNELS, accumulator, seed, places)
    replace(hopper, "_kernels", lambda: kernels)
    replace(hopper, "is_there", lambda _device: True)
    replace(hopper, "processors", lambda _device: PROCESSORS)
    if accumulator == "float64":
        replace(hopper, "takes_shapes", lambda dtype, *_: dtype == torch.float64)
    return kernels
