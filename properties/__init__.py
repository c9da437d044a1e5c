"""What must hold: problems to draw, guarantees to check, and ``verify``, which does both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from properties.verification import Report, verify

__all__ = ["Report", "verify"]


def __getattr__(name: str) -> Any:
    # Not at once: some modules here have to run before torch is imported.
    if name in __all__:
        from properties import verification

        return getattr(verification, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
