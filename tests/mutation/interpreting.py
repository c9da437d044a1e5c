"""A process that runs kernels in the interpreter, and can fork."""

from __future__ import annotations

import math
import os
from typing import Any

__all__ = ["MOST_PROGRAMS", "EndlessLaunchError", "interpret", "refuse_endless_launches"]

# Of one launch: some tests have a head more than 65535. The interpreter takes minutes for more.
MOST_PROGRAMS = 200_000


class EndlessLaunchError(RuntimeError):
    """A launch of so many programs that nobody waits for the interpreter to run them."""


def interpret() -> None:
    """Makes this process one; to be called before Triton or any kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from fa_verify.simulator.interpreter import repair

    repair.repair()
    refuse_endless_launches()
    import torch

    # A fork copies the thread that it is made in alone.
    torch.set_num_threads(1)


def refuse_endless_launches() -> None:
    """Has a launch of more than MOST_PROGRAMS programs raise.

    But where a test runs chosen ones of them, by a ``range`` of its own in the interpreter.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def bounded(self: Any, *args: Any, **kwargs: Any) -> None:
        is_whole = not hasattr(interpreter, "range")
        if is_whole and isinstance(self.grid, tuple) and math.prod(self.grid) > MOST_PROGRAMS:
            raise EndlessLaunchError(f"the grid {self.grid} has more than {MOST_PROGRAMS} programs")
        launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = bounded
