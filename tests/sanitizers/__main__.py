"""Runs sanitizers on the kernels and on a planted fault each, and says which find what.

python -m tests.sanitizers [name ...]

A sanitizer that is absent is named with the reason. The exit code is 0 if the others find the
planted fault and nothing in the kernels, and at least one of them ran.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time

__all__ = ["NVIDIA", "TRITON", "absence", "main"]

NVIDIA = ("memcheck", "racecheck", "synccheck")
# A module of Triton that a sanitizer came with.
TRITON = {
    "consan": "triton._instrumentation",
    "gsan": "triton.experimental.gsan",
    "fpsan": "triton.experimental.gluon.language.fpsan",
}
# Words of a report, as opposed to another failure of the process.
_REPORTS = {
    "memcheck": "Invalid __global__ write",
    "racecheck": "hazard",
    "synccheck": "Barrier error",
    "consan": "device-side assert",
    "gsan": "race",
    "fpsan": "differ in their algebra",
}
_FAILED = 7
_SECONDS = 300


def absence(name: str) -> str:
    """Returns the reason why a sanitizer is absent; empty if it is there."""
    if name in NVIDIA:
        found = shutil.which("compute-sanitizer")
        return "" if found else "compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
    with_triton = importlib.util.find_spec("triton")
    if with_triton is None or importlib.util.find_spec(TRITON[name]) is None:
        return "this Triton has no such sanitizer; 3.9 has it"
    return ""


def _run(name: str, *planted: str) -> tuple[int, str]:
    """Returns the exit code and the output of the calls under a sanitizer."""
    command = [sys.executable, "-m", "tests.sanitizers.calls", name, *planted]
    environment = dict(os.environ)
    if name in NVIDIA:
        watched = ["compute-sanitizer", "--tool", name, "--error-exitcode", str(_FAILED)]
        command = watched + command
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    else:
        environment["TRITON_INSTRUMENTATION_MODE"] = name
        environment["CUDA_LAUNCH_BLOCKING"] = "1"  # the traceback names the kernel that fails
    try:
        done = subprocess.run(
            command, env=environment, timeout=_SECONDS, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return -1, (said.decode() if isinstance(said, bytes) else said) + f"over {_SECONDS} s"
    return done.returncode, done.stdout


def _excerpt(name: str, said: str) -> str:
    """The first lines of a report within an output, and the output's end."""
    lines = said.splitlines()
    report = [line for line in lines if any(word in line for word in (_REPORTS[name], "ssert"))]
    return "\n".join([*report[:10], said[-2000:]])


def _verdict(name: str) -> tuple[bool, str]:
    """Whether a sanitizer finds the planted fault and nothing in the kernels, with its output."""
    code, said = _run(name, "planted")
    if code == 0 or _REPORTS[name] not in said:
        return False, f"does not find the planted fault (exit code {code})\n{_excerpt(name, said)}"
    if name == "memcheck":
        return True, "finds the planted fault; pytest runs the kernels under it"
    code, said = _run(name)
    if code:
        return False, f"fails on the kernels (exit code {code})\n{_excerpt(name, said)}"
    return True, "finds the planted fault, and nothing in the kernels"


def main(arguments: list[str] | None = None) -> int:
    """Runs the sanitizers and prints a line, or the output, for each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*NVIDIA, *TRITON)
    parser.add_argument("names", nargs="*", metavar="name", help=f"out of {', '.join(names)}")
    asked = parser.parse_args(arguments).names or names
    if unknown := set(asked) - set(names):
        parser.error(f"name is {', '.join(sorted(unknown))}; needs some of {', '.join(names)}")
    verdicts = []
    for name in asked:
        if reason := absence(name):
            print(f"{name}: absent: {reason}", flush=True)
            continue
        start = time.monotonic()
        is_right, said = _verdict(name)
        verdicts.append(is_right)
        print(f"{name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(not (verdicts and all(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
