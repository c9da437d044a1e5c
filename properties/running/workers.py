"""Choose the number of worker processes, and the GPU and the number of threads of each.

This module runs before torch and NumPy are imported, and must not import them: CUDA and OpenBLAS
read their environment variables only once.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping

__all__ = [
    "auto_workers",
    "keep_to_one_thread",
    "num_workers",
    "pin",
    "sharing",
    "visible_gpus",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The GPUs of the run, separated by commas. The first process sets it and its workers inherit it.
GPUS_OF_THE_RUN = "FA_VERIFY_GPUS"
# Timeout of nvidia-smi, which takes about a second for each GPU without persistence mode.
NVIDIA_SMI_SECONDS = 30.0

# Processes on one GPU hardly overlap: 235 problems/s with one, 302/s with sixteen. Compiling and
# drawing problems is work for the CPUs, which more processes do share.
WORKERS_PER_GPU = 16
# A CUDA context takes half a GiB, and a long problem with its float64 reference a few GiB.
GIB_PER_WORKER = 4.0


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA would use, as CUDA_VISIBLE_DEVICES names them.

    With the variable, these are its entries (numbers, UUIDs, names of MIG instances) up to the
    first invalid one, such as -1; if an entry occurs twice, CUDA uses no GPU. Without the variable,
    these are 0, 1, ... for the GPUs that nvidia-smi lists, or none if it fails or times out.
    """
    if VISIBLE in environ:
        return _entries(environ[VISIBLE])
    listed = _nvidia_smi(environ, "-L")
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed))]


def pin(environ: MutableMapping[str, str]) -> None:
    """Assign GPU K mod n to worker gwK of a run on n > 1 GPUs; otherwise change nothing.

    The first process of a run stores the list of GPUs in ``environ`` for its workers. If
    CUDA_VISIBLE_DEVICES differs from that list, it was narrowed on purpose, by an earlier call or
    by a test that hides the GPUs from its subprocess, and is not changed.
    """
    if GPUS_OF_THE_RUN not in environ:
        environ[GPUS_OF_THE_RUN] = ",".join(visible_gpus(environ))
    gpus = _entries(environ[GPUS_OF_THE_RUN])
    narrowed = VISIBLE in environ and _entries(environ[VISIBLE]) != gpus
    worker = re.fullmatch(r"gw(\d+)", environ.get("PYTEST_XDIST_WORKER", ""))
    if worker and len(gpus) > 1 and not narrowed:
        environ[VISIBLE] = gpus[int(worker[1]) % len(gpus)]


def keep_to_one_thread(environ: MutableMapping[str, str]) -> None:
    """Set OMP_NUM_THREADS to 1 unless it is set.

    Products of small matrices busy-wait for the other threads, whose CPUs other processes may use.
    A replay has as many threads as the worker that found its problem, and so the same bits. torch
    and NumPy's OpenBLAS read the variable when they are imported.
    """
    environ.setdefault("OMP_NUM_THREADS", "1")


def sharing(environ: Mapping[str, str]) -> int:
    """Return the number of workers that share this worker's GPU, including it; 1 without xdist."""
    count = int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return math.ceil(count / max(1, len(_entries(environ.get(GPUS_OF_THE_RUN, "")))))


def auto_workers(cpus: int, gpus: int, memory_gib_per_gpu: float) -> int:
    """Return the number of workers for a machine, limited by its CPUs and GPUs; at least 1.

    Args:
        cpus: Number of CPUs that this process may use.
        gpus: Number of GPUs; with 0 only the CPUs limit the result.
        memory_gib_per_gpu: Memory of the smallest GPU in GiB; infinite if unknown.
    """
    if not gpus:
        return max(1, cpus)
    per_gpu = int(min(WORKERS_PER_GPU, memory_gib_per_gpu / GIB_PER_WORKER))
    return max(1, min(cpus, gpus * per_gpu))


def num_workers(
    environ: Mapping[str, str] = os.environ, *, limit: float | None = None
) -> int | None:
    """Return the number of workers for ``-n auto``, where they may take ``limit`` GiB of each GPU.

    Returns None, so that xdist decides, if there is no GPU or PYTEST_XDIST_AUTO_NUM_WORKERS is set.
    """
    known = environ.get(GPUS_OF_THE_RUN)
    gpus = visible_gpus(environ) if known is None else _entries(known)
    if not gpus or environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    lines = _nvidia_smi(environ, "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    # GPUs that share the CPU's memory report "[N/A]".
    mebibytes = [float(line) for line in lines if re.fullmatch(r"\d+", line.strip())]
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = min(mebibytes, default=math.inf) / 1024
    return auto_workers(cpus, len(gpus), min(memory, limit or math.inf))


def _entries(listed: str) -> list[str]:
    """Return the entries of a CUDA_VISIBLE_DEVICES that CUDA uses."""
    entries: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry in entries:
            return []
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry):
            break
        entries.append(entry)
    return entries


def _nvidia_smi(environ: Mapping[str, str], *arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; an empty list if it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
