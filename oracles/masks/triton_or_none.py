"""Triton if it is installed: masks work without it, except for their Triton predicates."""

from __future__ import annotations

from typing import Any

__all__ = ["jit", "tl"]

jit: Any
tl: Any
try:
    import triton
    import triton.language

    jit, tl = triton.jit, triton.language
except ImportError:
    # Without Triton, no code calls a jit function.
    jit, tl = (lambda function: function), None
