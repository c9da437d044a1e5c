"""The numerics of kernels: ``python -m benchmarks.numerics --seconds S [--kernels NAME ...]``.

For each kernel and dtype, the command probes the orders of sums, casts, tiles and the arithmetic,
and measures errors against the float64 oracle. Each kernel has processes of its own, one after
the other: one that crashes or takes too long loses the answers of that step alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.findings.environment import device_name, versions
from benchmarks.numerics_of_kernel import ALIASES, FAMILIES, HEAD_DIM, SEEDS, SIZE
from benchmarks.numerics_table import report
from benchmarks.saving import saved
from fa_verify.adapters.registry import NAMED
from fa_verify.properties.running import workers
from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["Clock", "main", "measured", "names_here"]

ROOT = Path(__file__).parents[1]
VERSION = 1
# Configurations of this project's kernels; "portable" is the default where there is no GPU.
OURS = ("default", "portable", "default-one_pass", "tf32")
# Kernels of other repositories, and where make kernels brings their files.
ADAPTERS, BROUGHT = "tests/kernels", "build/kernels"
_FILE = re.compile(r'"([\w.-]+/[\w.-]+)",\s+"([^"]+\.py)"')
_ATTENTION = re.compile(r"^(?:def )?attention\b", re.MULTILINE)
# A call that takes this share of a kernel's time hangs.
_HANGS = 1 / 4
# Statuses of a process that took all of its steps, or that could not load the kernel.
_TAKEN = (0, 2)
_TOPICS = ("accuracy", "numerics", "orders")
# Seconds that starting a process takes at least.
_START = 2.0


def names_here(device: str) -> list[str]:
    """Returns the kernels that can run here, those that compile longest first."""
    here = [name for name, kernel in NAMED.items() if kernel.missing() is None]
    if "ours" in here:
        at = here.index("ours")
        here[at : at + 1] = [f"ours/{x}" for x in OURS if device == "cuda" or x != "portable"]
    here.sort(key=lambda name: name != "flex")
    if device == "cpu":
        here += ALIASES
    return here + [f"{path}:attention" for path in _brought()]


def _brought() -> Iterator[str]:
    """Yields the adapters of attention whose kernels are there."""
    for path in sorted((ROOT / ADAPTERS).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        files = _FILE.findall(text) if _ATTENTION.search(text) else []
        if files and all((ROOT / BROUGHT / name / file).is_file() for name, file in files):
            yield path.relative_to(ROOT).as_posix()


class Clock:
    """Divides the time that is left among the kernels that are left.

    Args:
        seconds: Time of the run.
        kernels: Number of kernels.
        processes: Number of kernels that run at a time.
    """

    def __init__(self, seconds: float, kernels: int, processes: int) -> None:
        self.until = time.monotonic() + seconds
        self.left, self.processes = kernels, processes
        self._lock = threading.Lock()

    def share(self) -> float:
        """Returns the seconds of a kernel that starts now."""
        with self._lock:
            rounds = max(1.0, self.left / self.processes)
            self.left -= 1
        return max(0.0, self.until - time.monotonic()) / rounds


def measured(name: str, clock: Clock) -> dict[str, Any]:
    """Returns the record of one kernel, after at most its share of the time.

    Args:
        name: The kernel, as for ``benchmarks.numerics_of_kernel``.
        clock: The time of the run.
    """
    began = time.monotonic()
    seconds = clock.share()
    until = began + seconds
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="numerics-") as folder:
        path = Path(folder) / "lines.jsonl"
        state = "done"
        while True:
            steps = len(_steps(path))
            status, said = _process(name, path, until - time.monotonic(), seconds * _HANGS)
            if status in _TAKEN:
                break
            if status is None:
                state = "no time"
                break
            begun = _steps(path)
            if len(begun) == steps:
                state = f"ended: {said}"
                break
            ended[begun[-1]] = said
        lines = [*_lines(path)]
    return _record(lines, ended, state) | {"seconds": round(time.monotonic() - began, 1)}


def _process(name: str, path: Path, left: float, hangs: float) -> tuple[int | None, str]:
    """Takes steps in a process; returns its status, None without time, and its last words."""
    if left < _START:
        return None, ""
    environment = dict(os.environ)
    workers.keep_to_one_thread(environment)
    command = [sys.executable, "-m", "benchmarks.numerics_of_kernel", name, str(path), str(hangs)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        process = subprocess.Popen(
            command, cwd=Path.cwd(), env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=words,
        )  # fmt: skip
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # Compilers are processes of the group.
            _kill(process)
        words.seek(0)
        return status, _said(status, words.read())


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _said(status: int | None, words: str) -> str:
    """Describes how a process ended."""
    if status is not None and status < 0:
        return f"signal {-status} ({signal.strsignal(-status)})"
    # The watchdog's line names a hang, or a lost GPU, above the stack.
    told = re.search(r"^(?:hang|cuda error): .*$", words, re.MULTILINE)
    last = (words.strip().splitlines() or [f"status {status}"])[-1]
    return (told[0] if told else last)[:200]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a file: a process that is killed may leave a part of one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _steps(path: Path) -> list[str]:
    return [line["step"] for line in _lines(path) if "step" in line]


def _record(lines: Sequence[Mapping[str, Any]], ended: Mapping[str, str], state: str) -> Any:
    """Collects the lines of a kernel: by dtype its answers, its errors, and what is missing."""
    dtypes: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"state": state, "dtypes": dtypes}
    begun = [line["step"] for line in lines if "step" in line]
    complete = any("end" in line for line in lines)
    for line in lines:
        if "note" in line:
            found["state"] = line["note"]
        for dtype in line.get("dtypes", ()):
            dtypes.setdefault(dtype, {"missing": {}, "answers": {}, "accuracy": {}})
            found["declared"] = line["declared"]
        if "answer" in line:
            answer = dict(line["answer"])
            dtypes[line["dtype"]]["answers"][answer.pop("word")] = answer
        if "family" in line:
            kept = {word: x for word, x in line.items() if word not in ("dtype", "family")}
            dtypes[line["dtype"]]["accuracy"][line["family"]] = kept
    for dtype, of in dtypes.items():
        for topic in _TOPICS:
            step = f"{topic} {dtype}"
            if step in ended:
                of["missing"][topic] = f"ended: {ended[step]}"
            elif not complete and (step not in begun or step == begun[-1]):
                of["missing"][topic] = state
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; a kernel that fails is a line of the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics")
    parser.add_argument("--seconds", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument(
        "--kernels", nargs="+", metavar="NAME",
        help="NAME, NAME/CONFIGURATION or FILE.py:NAME (default: all that can run here)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, help="processes (default: all CPUs, at most 16)")
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--write", action="store_true", help="write to results/, not to build/")
    written.add_argument("--out", type=Path, metavar="FILE", help="write to FILE")
    options = parser.parse_args(arguments)
    if options.write and options.kernels:
        parser.error("--write needs every kernel; --kernels leaves some out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = options.kernels or names_here(device)
    count = min(len(kernels), options.workers or min(16, os.cpu_count() or 1))
    began = time.monotonic()
    clock = Clock(options.seconds, len(kernels), count)
    found: dict[str, Any] = {}
    record = {
        "version": VERSION, "device": device_name(), "versions": versions(),
        "seconds": options.seconds, "workers": count,
        "accuracy": {"families": FAMILIES, "seeds": SEEDS, "length": SIZE, "head_dim": HEAD_DIM},
        "kernels": {name: {"state": "no time", "dtypes": {}} for name in kernels},
    }  # fmt: skip
    path = options.out
    with ThreadPoolExecutor(count) as pool:
        asked = {pool.submit(measured, name, clock): name for name in kernels}
        for done in as_completed(asked):
            name = asked[done]
            found[name] = done.result()
            record["kernels"] |= found
            print(_line(name, found[name]), flush=True)
            # A run that is interrupted leaves the kernels so far.
            if options.out is None:
                path = saved(ROOT, "numerics.json", record, device=device, keep=options.write)
            else:
                write_atomically(options.out.absolute(), json.dumps(record, indent=1) + "\n")
    print("\n".join(report(record)))
    print(f"{len(kernels)} kernels in {time.monotonic() - began:.0f} s; wrote {path}")
    return 0


def _line(name: str, of: Mapping[str, Any]) -> str:
    """Formats what was found of a kernel."""
    answers = [x for y in of["dtypes"].values() for x in y["answers"].values()]
    known = sum(x["certainty"] != "undecided" for x in answers)
    missing = sorted({x for y in of["dtypes"].values() for x in y["missing"].values()})
    return (
        f"{name}: {of['state']}; {', '.join(of['dtypes']) or 'no dtype'}; {known} of "
        f"{len(answers)} answers known, {of['seconds']:.0f} s"
        + (f"; missing: {'; '.join(missing)}" if missing else "")
    )


if __name__ == "__main__":
    sys.exit(main())
