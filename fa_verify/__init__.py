"""Differential testing and numerics verification for FlashAttention-style kernels.

``verify`` checks a kernel from within another test suite. ``assert_attention_close`` judges tensors
that a test has computed. ``attention_kernel`` declares which inputs a kernel supports and how it
rounds. ``pytest_plugin`` provides the command line.

``oracles`` and ``properties`` are subpackages: links to the neighbouring folders in a checkout,
ordinary folders in a wheel.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_verify.attention_close import assert_attention_close
    from fa_verify.oracles.masks.mask import Mask
    from fa_verify.oracles.outputs import Numerics
    from fa_verify.properties.kernels.attention_kernel import attention_kernel
    from fa_verify.verification import Report, verify

__all__ = ["Mask", "Numerics", "Report", "assert_attention_close", "attention_kernel", "verify"]

_MODULES = {
    "Mask": "fa_verify.oracles.masks.mask",
    "Numerics": "fa_verify.oracles.outputs",
    "Report": "fa_verify.verification",
    "assert_attention_close": "fa_verify.attention_close",
    "attention_kernel": "fa_verify.properties.kernels.attention_kernel",
    "verify": "fa_verify.verification",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("fa-verify")
    # Imported lazily: the plugin sets environment variables before torch is imported.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
