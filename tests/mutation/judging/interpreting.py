"""Prepares a process to run kernels in Triton's interpreter and to fork."""

from __future__ import annotations

import math
import os
from typing import Any

__all__ = ["MOST_PROGRAMS", "EndlessLaunchError", "interpret", "refuse_endless_launches"]

# Programs of one launch. Some tests need more than 65535; the interpreter takes minutes for more.
MOST_PROGRAMS = 200_000


class EndlessLaunchError(RuntimeError):
    """A launch has more programs than the interpreter can run in reasonable time."""


def interpret() -> None:
    """Selects the interpreter; call it before Triton or any kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from fa_verify.simulator.interpreter import repair

    repair.repair()
    refuse_endless_launches()
    import torch

    # A fork copies only the thread that calls it.
    torch.set_num_threads(1)


def refuse_endless_launches() -> None:
    """Makes a launch of more than MOST_PROGRAMS programs raise.

    A launch is allowed if a test replaces the interpreter's ``range`` to run chosen programs.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def bounded(self: Any, *args: Any, **kwargs: Any) -> None:
        is_whole = not hasattr(interpreter, "range")
        if is_whole and isinstance(self.grid, tuple) and math.prod(self.grid) > MOST_PROGRAMS:
            raise EndlessLaunchError(f"the grid {self.grid} has more than {MOST_PROGRAMS} programs")
        launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = bounded
