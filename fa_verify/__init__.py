"""Differential testing and numerics verification for FlashAttention-style kernels.

``verify`` judges a kernel inside another test suite; ``pytest_plugin`` is the command line.
``oracles``, ``properties`` and ``simulator`` are subpackages. In a checkout they are links to the
folders beside this one, in a wheel they are folders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_verify.verification import Report, verify

__all__ = ["Report", "verify"]


def __getattr__(name: str) -> Any:
    # Lazy: the environment has to be set before torch is imported.
    if name in __all__:
        from fa_verify import verification

        return getattr(verification, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
