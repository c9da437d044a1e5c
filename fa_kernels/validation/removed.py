"""Removed options of the public functions: the error for each names its replacement."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["names_replacements"]


def names_replacements(**instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function so that a removed option raises a TypeError naming its replacement.

    Args:
        instead: The replacement of each removed option, such as ``window="window_size="``.
    """

    def decorated(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options:
                if name in instead:
                    raise TypeError(f"{name}= is no longer an option; needs {instead[name]}")
            return call(*args, **options)

        checked.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
        return checked

    return decorated
