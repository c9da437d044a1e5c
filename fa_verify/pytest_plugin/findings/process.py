"""The conformance tests of one kernel in processes of their own, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fa_verify.pytest_plugin.findings.collecting import collected, recorded
from fa_verify.pytest_plugin.findings.recording import ROOT, plain

__all__ = ["FINISHED", "conformance_of"]

FINISHED = "finished"
# Exit codes of pytest for runs that went to their end: all passed, some failed.
_TO_THE_END = (0, 1)
# Seconds that a run has to write down what it has, once its time is over.
GRACE = 20.0
LAST_LINES = 12


def conformance_of(
    kernel: str, *, profile: str, workers: str, seconds: float, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs ``pytest --kernel=KERNEL tests/conformance`` and reads what it found.

    Args:
        kernel: What --kernel takes.
        profile: Of Hypothesis.
        workers: For -n; each is a process, so that a crash is a finding like others.
        seconds: After so many the run is ended; what it had by then counts.
        options: Further options of pytest.

    Returns:
        ``collected`` of the run; how it ``ended``, "finished" or what happened instead; and what
        it ``said`` last, if it did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="findings-") as folder:
        records, log = Path(folder) / "records.jsonl", Path(folder) / "log"
        command = [
            sys.executable, "-m", "pytest", "tests/conformance", f"--kernel={kernel}",
            f"--findings={records}", f"--hypothesis-profile={profile}", "-n", workers,
            "-p", "no:cacheprovider", "-q", "--tb=no", "--no-header", *options,
        ]  # fmt: skip
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        ended = _ending(process, seconds)
        found = recorded(records)
        if ended == FINISHED and not any(record["kind"] == "end" for record in found):
            ended = "ended without a summary"
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = "" if ended == FINISHED else plain("\n".join(said[-LAST_LINES:]))
        return {**collected(found), "ended": ended, "said": last}


def _ending(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Waits for a process, or ends it with all that it has started; says what became of it."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _signal_all(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return f"out of time after {seconds:g} s"
    finally:
        _signal_all(process, signal.SIGKILL)
        process.wait()
    if code in _TO_THE_END:
        return FINISHED
    return f"died of signal {-code}" if code < 0 else f"exit code {code}"


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals a process and its children, those that outlived it too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
