"""Limits of the interpreter, which say nothing about a kernel."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

__all__ = ["CannotRunError", "limit_of"]

_SIMULATOR = str(Path(__file__).resolve().parents[1])


class CannotRunError(NotImplementedError):
    """A kernel needs a feature that only a GPU has.

    Args:
        reason: The feature that is missing.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot run on a CPU: {reason}")


def limit_of(error: BaseException, interpreter: Any) -> CannotRunError | None:
    """Return what the interpreter lacks, if that is why a launch fails; else None.

    The interpreter raises NotImplementedError itself, or its builder of operations has no method
    for one.

    Args:
        error: The exception of the launch.
        interpreter: The module ``triton.runtime.interpreter``.
    """
    if isinstance(error, CannotRunError):
        return error
    owners = (interpreter.InterpreterBuilder, interpreter.InterpreterOptions)
    if isinstance(error, AttributeError) and isinstance(error.obj, owners):
        return CannotRunError(f"Triton's interpreter has no {error.name}")
    if isinstance(error, NotImplementedError) and error.__traceback__ is not None:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        file = str(Path(innermost.f_code.co_filename).resolve())
        if file == str(Path(interpreter.__file__).resolve()) or file.startswith(_SIMULATOR):
            return CannotRunError(str(error) or f"Triton's interpreter, {innermost.f_code.co_name}")
    return None
