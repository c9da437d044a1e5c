"""One process at a time takes many GiB of a GPU that several processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["large_memory"]


@contextlib.contextmanager
def large_memory(device: str) -> Iterator[None]:
    """Wait until no other process of the user is in such a block for the same GPU.

    Two processes that each find enough free memory could otherwise both allocate it. The caller
    compares its need with the free memory inside the block, and frees the memory before its end.

    Args:
        device: "cuda"; on "cpu" the block does not wait.
    """
    if device != "cuda":
        yield
        return
    gpu = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"fa-verify-{os.getuid()}-gpu-{gpu}.lock"
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed
        yield
