"""Launches go to the tensors' device, whichever is current."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["on_device"]


def on_device(x: torch.Tensor) -> AbstractContextManager:
    """Makes the device of a tensor the current one, if it is a GPU."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
