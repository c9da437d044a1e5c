"""Several processes share the memory of a GPU.

One of them at a time allocates many GiB of it. ``--fa-gpu-memory`` limits what each may hold.
"""

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

from fa_verify.oracles.call import Call
from fa_verify.properties.kernels.refusals import NoRoomError
from fa_verify.properties.running.workers import GIB_PER_WORKER, sharing

__all__ = [
    "free_memory",
    "large_memory",
    "larger_than_the_machine",
    "leaves_room",
    "limit_memory",
    "no_room",
    "refusal_without_room",
    "spare_memory",
]

_PATIENCE = 100.0  # seconds of a process: the longest test with much memory takes half of it
_CONTEXT = 2**29  # bytes that CUDA holds for a process beside its tensors
_GIB = 2**30
_BESIDE = 3 * 2**29  # bytes of a process that runs ordinary tests
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": _GIB}
# Errors that name no size: Triton loads the code or the local memory of a kernel, or cuBLAS creates
# a handle.
_WITHOUT_SIZE = ("Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"Tried to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMG]iB)")

_limit: int | None = None
_waited = 0.0  # seconds that this process has waited for memory


def larger_than_the_machine(call: Call) -> str:
    """Return why the outputs of a call do not fit a CPU's memory in float64; empty if they do."""
    needed = 8 * sum(call.elements.values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if call.device != "cpu" or needed <= there:
        return ""
    return (
        f"the outputs of the problem take {needed / _GIB:,.0f} GiB in float64; "
        f"this machine has {there / _GIB:,.0f} GiB"
    )


def limit_memory(gib: float, processes: int) -> None:
    """Limit the tensors of this process to its share of a part of the current GPU.

    Args:
        gib: The memory that all processes together may take, in GiB.
        processes: The number of processes that share it.

    Raises:
        ValueError: A share has no room for tensors beside the context of CUDA.
    """
    global _limit
    share = gib * _GIB / processes
    if share < 2 * _CONTEXT:
        raise ValueError(
            f"{gib:g} GiB for {processes} processes; needs 1 GiB for each at least: "
            "allow more, or start fewer workers with -n"
        )
    total = torch.cuda.mem_get_info()[1]
    _limit = int(min(share, total) - _CONTEXT)
    torch.cuda.set_per_process_memory_fraction(_limit / total)


def free_memory() -> int:
    """Return the bytes of the current GPU that this process may still allocate."""
    free = torch.cuda.mem_get_info()[0]
    return free if _limit is None else min(free, _limit - torch.cuda.memory_reserved())


def spare_memory() -> int:
    """Return the bytes of a GPU that the other processes of a run may allocate meanwhile."""
    return 2**29 * max(2, sharing(os.environ))


def leaves_room(size: int) -> bool:
    """Return whether the other processes of a run can work beside one that holds so many bytes.

    Early in a run they hold little, so that the free memory does not tell.
    """
    others = sharing(os.environ) - 1
    return bool(size + others * _BESIDE <= torch.cuda.mem_get_info()[1])


def no_room(error: BaseException) -> str:
    """Return why an allocation failed, if the kernel is not to blame; else "".

    It ran into the limit. Or, without one, this process and the failed allocation need no more
    than the memory for which a worker is started, so that other processes hold the rest. They do
    too if Triton or cuBLAS fails and this process could not reach that much memory.
    """
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _WITHOUT_SIZE):
        size, room = 0.0, torch.cuda.mem_get_info()[0]
    elif not isinstance(error, torch.cuda.OutOfMemoryError):
        return ""
    elif _limit is not None:
        return f"needs more than the {_limit / _GIB:.2g} GiB that --fa-gpu-memory leaves a process"
    elif asked := _ASKED.search(str(error)):
        size, room = float(asked["number"]) * _UNITS[asked["unit"]], 0
    else:
        return ""
    if size + room + torch.cuda.memory_reserved() + _CONTEXT > GIB_PER_WORKER * _GIB:
        return ""
    return (
        f"finds less than {GIB_PER_WORKER:g} GiB of the GPU, because other processes hold the "
        "rest: stop them, or start fewer workers with -n"
    )


@contextlib.contextmanager
def refusal_without_room() -> Iterator[None]:
    """Raise NoRoomError for an allocation in the block that ``no_room`` explains."""
    try:
        yield
    except RuntimeError as error:  # torch.cuda.OutOfMemoryError is one
        if reason := no_room(error):
            raise NoRoomError(reason) from error
        raise


@contextlib.contextmanager
def large_memory(device: str, size: int) -> Iterator[bool]:
    """Wait until that much is free and no other process of the user is in such a block.

    Two processes that each find enough free memory could otherwise both allocate it. All waits for
    memory of a process together take no longer than other tests need theirs; a process that holds
    it longer will not free it. The block yields whether that much is free now. The caller allocates
    inside the block, and may use the memory after it.

    Args:
        device: "cuda"; on "cpu" the block does not wait, and yields True.
        size: The memory that the caller needs, in bytes.
    """
    global _waited
    if device != "cuda":
        yield True
        return
    gpu = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = Path(tempfile.gettempdir()) / f"fa-verify-{os.getuid()}-gpu-{gpu}.lock"
    torch.cuda.empty_cache()  # for the process that is in its block
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed
        begin, before = time.monotonic(), _waited
        while free_memory() < size <= (_limit or size) and _waited < _PATIENCE:
            # A process that needs less goes first.
            fcntl.flock(handle, fcntl.LOCK_UN)
            torch.cuda.empty_cache()
            time.sleep(0.1)
            fcntl.flock(handle, fcntl.LOCK_EX)
            _waited = before + time.monotonic() - begin
        yield free_memory() >= size
