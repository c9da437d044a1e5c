"""A process that runs kernels in the interpreter, and can fork."""

from __future__ import annotations

import os

__all__ = ["interpret"]


def interpret() -> None:
    """Makes this process one; to be called before Triton or any kernel is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from properties import interpreter

    interpreter.repair()
    import torch

    # A fork copies the thread that it is made in alone.
    torch.set_num_threads(1)
