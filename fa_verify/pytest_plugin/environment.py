"""Set up the process of a run: one GPU and one thread; without a GPU, the interpreter.

Import this module before torch, NumPy and Triton, which read the environment only once.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from fa_verify.properties.running import workers

__all__ = ["HAS_TRITON", "INTERPRETED", "ON_GPU", "WITHOUT_TRITON"]

workers.pin(os.environ)
workers.keep_to_one_thread(os.environ)
# Triton's default for fusing multiply and add differs between versions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED

# Why kernels cannot import Triton although it is installed; "" if they can.
WITHOUT_TRITON = ""

if INTERPRETED:
    from fa_verify.simulator.interpreter import repair

    try:
        repair.repair()
    except RuntimeError as error:
        # The interpreter of another version. A PyTorch function needs none.
        WITHOUT_TRITON = str(error)
        HAS_TRITON = INTERPRETED = False
        sys.modules["triton"] = None  # type: ignore[assignment]
