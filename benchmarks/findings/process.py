"""Run the conformance tests of one kernel in separate processes, which may crash or hang."""

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

from benchmarks.findings.collecting import collected, recorded
from fa_verify.reporting.recording import ROOT, plain

__all__ = ["FINISHED", "conformance_of"]

FINISHED = "finished"
# Exit statuses of complete runs: see docs/command.md.
_TO_THE_END = (0, 1, 3, 4)
# Seconds that an interrupted run has to write its results.
GRACE = 20.0
LAST_LINES = 12


def conformance_of(
    kernel: str, *, profile: str, workers: str, seconds: float, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Run ``pytest --fa-kernel=KERNEL tests/conformance`` and return a summary of its results.

    Args:
        kernel: Value of --fa-kernel.
        profile: Name of the Hypothesis profile.
        workers: Value of -n. Each worker is a process, so that a crash is reported as a finding.
        seconds: Time limit in seconds. The results up to the limit count.
        options: Further options of pytest.

    Returns:
        The dict of ``collected`` with two more keys: ``ended``, "finished" or a description of how
        the run ended; and ``said``, the last lines of output of a run that did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="findings-") as folder:
        records, log = Path(folder) / "records.jsonl", Path(folder) / "log"
        command = [
            sys.executable, "-m", "pytest", "tests/conformance", f"--fa-kernel={kernel}",
            f"--fa-findings={records}", f"--hypothesis-profile={profile}", "-n", workers,
            # All crashes are findings.
            "--max-worker-restart=1000",
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
    """Wait for a process and return how it ended. After ``seconds``, end it and its children."""
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
    """Send a signal to a process group, including children that outlived the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
