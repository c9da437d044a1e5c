"""Refusals: a kernel ends a call without a result, as it does not support it.

Only the call of a kernel refuses. A NotImplementedError that the oracle, the inputs or a check
raises is an error of the suite.
"""

from __future__ import annotations

__all__ = ["CannotRunError", "ExcludedCallError", "NoRoomError", "RefusedError"]


class RefusedError(NotImplementedError):
    """The kernel raises NotImplementedError."""


class ExcludedCallError(RefusedError):
    """The declarations of the kernel exclude the call."""


class NoRoomError(RefusedError):
    """Other processes hold the memory that the call needs."""


class CannotRunError(RefusedError):
    """The call needs a GPU, or the interpreter does not support a function of the kernel."""
