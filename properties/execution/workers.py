"""How many worker processes a machine takes, and which GPU each of them uses.

And how many threads each has. Runs before torch and NumPy are imported, and imports nothing that
would: CUDA and OpenBLAS read their variables once.
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
# The GPUs of the whole run, comma-separated: the first process finds them, its workers inherit it.
GPUS_OF_THE_RUN = "FA_VERIFY_GPUS"
# nvidia-smi wakes every GPU that no process holds awake, about a second each.
NVIDIA_SMI_SECONDS = 30.0

# Processes on one GPU hardly overlap there: 235 problems/s in one became 302/s in sixteen. But
# compiling, and drawing problems, is work for CPUs, which more processes do share.
WORKERS_PER_GPU = 16
# A CUDA context takes half a GiB, and a long problem with its float64 reference a few more.
GIB_PER_WORKER = 4.0


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA would use, as CUDA_VISIBLE_DEVICES names them.

    They are the variable's entries (numbers, UUIDs, names of MIG instances) up to the first that
    is none of these, such as -1; an entry given twice makes CUDA see no GPU at all. Without the
    variable they are 0, 1, ... for what nvidia-smi lists; none where that fails or takes too long.
    """
    if VISIBLE in environ:
        return _entries(environ[VISIBLE])
    listed = _nvidia_smi(environ, "-L")
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listed))]


def pin(environ: MutableMapping[str, str]) -> None:
    """Gives worker gwK of a run on n > 1 GPUs the GPU K mod n; else leaves the choice as it is.

    The first process of a run leaves the list of GPUs in ``environ`` for its workers. A list that
    no longer names all of them was narrowed on purpose, by an earlier call or by a test that hides
    the GPUs from its subprocess: it stays.
    """
    if GPUS_OF_THE_RUN not in environ:
        environ[GPUS_OF_THE_RUN] = ",".join(visible_gpus(environ))
    gpus = _entries(environ[GPUS_OF_THE_RUN])
    narrowed = VISIBLE in environ and _entries(environ[VISIBLE]) != gpus
    worker = re.fullmatch(r"gw(\d+)", environ.get("PYTEST_XDIST_WORKER", ""))
    if worker and len(gpus) > 1 and not narrowed:
        environ[VISIBLE] = gpus[int(worker[1]) % len(gpus)]


def keep_to_one_thread(environ: MutableMapping[str, str]) -> None:
    """Has a process's products of matrices take one thread, unless the variable says otherwise.

    For processes that share a machine's CPUs: the threads of one would wait, busily, for the CPUs
    that others have. NumPy's OpenBLAS reads it too, and asks nobody else; both do when they are
    imported.
    """
    environ.setdefault("OMP_NUM_THREADS", "1")


def sharing(environ: Mapping[str, str]) -> int:
    """How many workers of the run share this one's GPU, itself included; 1 without workers."""
    count = int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return math.ceil(count / max(1, len(_entries(environ.get(GPUS_OF_THE_RUN, "")))))


def auto_workers(cpus: int, gpus: int, memory_gib_per_gpu: float) -> int:
    """Workers for a machine: bounded by its CPUs, and by each GPU's memory and use; at least 1.

    Args:
        cpus: CPUs that this process may use.
        gpus: GPUs; 0 leaves only the bound by the CPUs.
        memory_gib_per_gpu: Memory of the smallest, in GiB; infinite where unknown.
    """
    if not gpus:
        return max(1, cpus)
    per_gpu = int(min(WORKERS_PER_GPU, memory_gib_per_gpu / GIB_PER_WORKER))
    return max(1, min(cpus, gpus * per_gpu))


def num_workers(environ: Mapping[str, str] = os.environ) -> int | None:
    """Workers for ``-n auto``; None leaves it to xdist: there is no GPU, or its variable is set."""
    known = environ.get(GPUS_OF_THE_RUN)
    gpus = visible_gpus(environ) if known is None else _entries(known)
    if not gpus or environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    lines = _nvidia_smi(environ, "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    # Some GPUs share the memory of the CPUs and answer "[N/A]".
    mebibytes = [float(line) for line in lines if re.fullmatch(r"\d+", line.strip())]
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return auto_workers(cpus, len(gpus), min(mebibytes, default=math.inf) / 1024)


def _entries(listed: str) -> list[str]:
    """The entries of a CUDA_VISIBLE_DEVICES that CUDA uses."""
    entries: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry in entries:
            return []
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry):
            break
        entries.append(entry)
    return entries


def _nvidia_smi(environ: Mapping[str, str], *arguments: str) -> list[str]:
    """What nvidia-smi prints, line by line; nothing where there is none or where it fails."""
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
