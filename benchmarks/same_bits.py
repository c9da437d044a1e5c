"""Kernels that give the same bits in parts of a problem: ``python -m benchmarks.same_bits``.

Each kernel is probed in a process of its own, several at a time. On a CPU, Triton kernels run in
the interpreter. Kernels of other repositories need ``make kernels``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.findings.environment import device_name, versions
from benchmarks.saving import saved
from benchmarks.table import markdown
from fa_verify.properties.kernels.vocabulary import SAME_BITS

__all__ = ["KERNELS", "answers", "cpu_flash", "main", "table"]

ROOT = Path(__file__).parents[1]
VERSION = 1
_OTHERS = {
    "flash-linear-attention, parallel": "tests/kernels/fla_parallel.py:attention",
    "lightllm, prefill": "tests/kernels/lightllm_prefill.py:attention",
    "attention study group": "tests/kernels/study_group.py:attention",
}
_MATH = "PyTorch SDPA, composed of matrix products"
_FLASH = "PyTorch SDPA, flash attention"
# Device to the name in the table of each kernel that is probed there.
KERNELS = {
    "cpu": {
        "ours": "ours", _MATH: "sdpa-math", _FLASH: "benchmarks.same_bits:cpu_flash", **_OTHERS
    },
    "cuda": {
        "ours": "ours", _MATH: "sdpa-math", _FLASH: "sdpa-flash",
        "PyTorch SDPA, memory-efficient": "sdpa-efficient",
        "PyTorch SDPA, cuDNN": "sdpa-cudnn", "flash-attn-4": "flash-attn-4", **_OTHERS,
        "lmdeploy, prefill": "tests/kernels/lmdeploy_prefill.py:attention",
    },
}  # fmt: skip
_CHEAP = ("domain", "conventions", "numerics")
_SECONDS = 600
# Seconds after which no size begins.
_TRYING = 60.0


def cpu_flash(q, k, v, *, mask, sm_scale):  # type: ignore[no-untyped-def]
    """PyTorch's flash attention on the CPU."""
    from torch.nn.attention import SDPBackend

    from fa_verify.adapters.sdpa import _attention

    return _attention(SDPBackend.FLASH_ATTENTION, q, k, v, mask, sm_scale)


def answers(kernel: str) -> dict[str, Any]:
    """Probes a kernel: word to its value and the evidence."""
    from fa_verify.probing.command import subject_and_device
    from fa_verify.probing.probe import probe
    from fa_verify.probing.same_bits import same_bits_of
    from fa_verify.probing.trying import declares

    subject, device = subject_and_device(kernel)
    if not declares(subject):
        subject = subject.assuming(probe(subject, device, topics=_CHEAP).assumed())
    found = {answer.word: answer for answer in same_bits_of(subject, device, _TRYING)}
    of_word = {word: found[f"same_bits_{word}"] for word in SAME_BITS}
    return {word: [answer.value, answer.evidence] for word, answer in of_word.items()}


def table(record: Mapping[str, Any]) -> list[str]:
    """Formats a record of this command as a table of Markdown."""
    rows = []
    for name, found in record["kernels"].items():
        told = [{True: "holds", False: "fails", None: "-"}[value] for value, _ in found.values()]
        size = found["batch"][1].partition(", to ")[2]
        first = next((evidence for value, evidence in found.values() if value is False), "")
        rows.append((name, *told, first or f"none up to {size}"))
    return markdown(("kernel", *SAME_BITS.values(), "first difference"), rows)


def _probed(kernel: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.same_bits", f"--one={kernel}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS)


def _reason(stderr: str) -> str:
    """The last exception of a traceback: PyTorch adds hints below that of CUDA."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (lines or stderr.strip().splitlines() or ["failed"])[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a kernel cannot be probed here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bits", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write to results/, not to build/")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--one", metavar="KERNEL", help="print the answers about KERNEL as JSON")
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(answers(options.one)))
        return 0
    found: dict[str, Any] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        "version": VERSION, "device": device_name(), "versions": versions(), "kernels": {}
    }  # fmt: skip
    asked = KERNELS[device]
    with ThreadPoolExecutor(options.workers) as pool:
        probes = {pool.submit(_probed, kernel): name for name, kernel in asked.items()}
        for probe in as_completed(probes):
            name, done = probes[probe], probe.result()
            if done.returncode:
                print(f"{asked[name]}: {_reason(done.stderr)}", flush=True)
                continue
            found[name] = json.loads(done.stdout.splitlines()[-1])
            record["kernels"] = {name: found[name] for name in asked if name in found}
            # Written as they come, so that an interrupted run keeps them.
            path = saved(ROOT, "same_bits.json", record, device=device, keep=options.write)
            print("\n".join(table({"kernels": {name: found[name]}})[2:]), flush=True)
    if found:
        print("\n".join(table(record)))
        print(f"wrote {path}")
    return int(len(found) < len(asked))


if __name__ == "__main__":
    sys.exit(main())
