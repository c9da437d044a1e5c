"""One process at a time takes many GiB of a GPU that several processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["large_memory"]

_PATIENCE = 100.0  # seconds: the longest test with much memory of its own takes half of it


@contextlib.contextmanager
def large_memory(device: str, size: int) -> Iterator[None]:
    """Wait until no other process of the user is in such a block for the same GPU.

    Two processes that each find enough free memory could otherwise both allocate it. Then wait
    until that much is free, but no longer than other tests need theirs. The caller compares its
    need with the free memory inside the block, and frees the memory before its end.

    Args:
        device: "cuda"; on "cpu" the block does not wait.
        size: The memory that the caller needs, in bytes.
    """
    if device != "cuda":
        yield
        return
    gpu = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"fa-verify-{os.getuid()}-gpu-{gpu}.lock"
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed
        deadline = time.monotonic() + _PATIENCE
        while torch.cuda.mem_get_info()[0] < size and time.monotonic() < deadline:
            torch.cuda.empty_cache()
            time.sleep(0.1)
        yield
