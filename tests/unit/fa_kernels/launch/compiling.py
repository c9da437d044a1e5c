"""Runs modules that compile kernels in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

__all__ = ["printed_by"]


def printed_by(module: str, *arguments: str) -> dict:
    """The JSON that ``python -m MODULE`` prints."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
