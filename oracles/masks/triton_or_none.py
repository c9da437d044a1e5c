"""Triton where it is installed: masks are values that work without it, except natively."""

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
    # Nobody asks for a jit function without Triton.
    jit, tl = (lambda function: function), None
