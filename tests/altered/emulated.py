"""The project's Hopper kernels on a CPU: ``--fa-kernel=tests.altered.emulated:order_0``.

The number is the seed of the order of events. ``order_0_float64`` accumulates in float64, and its
kernels take float64 inputs only. Calls that the kernels do not take run on the portable ones, in
the interpreter.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

from fa_verify.adapters import ours
from tests.altered.emulation import PROCESSORS, emulate
from tests.mutation.catalogue.copies import PACKAGE, load, sources_of

__all__ = ["spec_of_order"]

_ORDER = re.compile(r"order_(\d+)(?:_(float64))?(?:_places_(\d+))?")
# Keeps the sources of the copies until the process ends.
_FOLDER = tempfile.TemporaryDirectory(prefix="emulated-")


def spec_of_order(seed: str = "0", accumulator: str = "float32", places: int = PROCESSORS) -> str:
    """Return the value of --kernel for the arguments of ``emulate``."""
    wide = "_float64" if accumulator == "float64" else ""
    few = "" if places == PROCESSORS else f"_places_{places}"
    return f"{__name__}:order_{seed}{wide}{few}"


@functools.cache
def _in_order(seed: str, accumulator: str, places: int) -> Any:
    folder = Path(_FOLDER.name) / f"in_order_{seed}_{accumulator}_{places}"
    package = load(sources_of(PACKAGE), folder)
    emulate(package, accumulator=accumulator, seed=seed, places=places)
    call = ours.adapted(package)
    call.devices = ("cpu",)
    return call


def __getattr__(name: str) -> Any:
    """Make the kernels of a name: ``order_0``, ``order_1_float64``, ``order_0_places_2``."""
    if found := _ORDER.fullmatch(name):
        return _in_order(found[1], found[2] or "float32", int(found[3] or PROCESSORS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
