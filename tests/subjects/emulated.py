"""The project's Hopper kernels on a CPU: ``--kernel=fa_verify.subjects.emulated:order_0``.

The number is the seed of the order of events. Calls that these kernels do not take run on the
portable ones, in the interpreter.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

from fa_verify.diagnosis.copies import PACKAGE, load, sources_of
from fa_verify.subjects import ours
from fa_verify.subjects.emulation import emulate

__all__ = ["spec_of_order"]

_ORDER = re.compile(r"order_(\d+)")
# Keeps the sources of the copies until the process ends.
_FOLDER = tempfile.TemporaryDirectory(prefix="emulated-")


def spec_of_order(seed: str) -> str:
    """Return the value of --kernel for the seed of an order of events."""
    return f"{__name__}:order_{seed}"


@functools.cache
def _in_order(seed: str) -> Any:
    package = load(sources_of(PACKAGE), Path(_FOLDER.name) / f"in_order_{seed}")
    emulate(package, seed=seed)
    call = ours.adapted(package)
    call.devices = ("cpu",)
    return call


def __getattr__(name: str) -> Any:
    """Make the kernels with the seed in a name, ``order_0`` and so on."""
    if found := _ORDER.fullmatch(name):
        return _in_order(found[1])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
