"""Selects the device of the tensors for launches, whichever device is current."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["on_device"]


def on_device(x: torch.Tensor) -> AbstractContextManager:
    """Returns a context in which the device of a tensor is current, if it is a GPU."""
    device = x.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
