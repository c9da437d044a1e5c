"""A pytest plugin that reports which problem a pytest-xdist worker was running when it died.

``fa_verify.pytest_plugin.plugin`` registers it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fa_verify.properties.execution.watchdog import Record, Watchdog

__all__ = ["DEFAULT_SECONDS", "CrashReports", "problem_timeout"]

DEFAULT_SECONDS = 60.0
DAY = 86_400.0


def problem_timeout(config: pytest.Config) -> float:
    """Return the option --problem-timeout, in seconds.

    Raises:
        pytest.UsageError: The value is not a number, not above 0, or more than a day.
    """
    given = config.getoption("--problem-timeout", DEFAULT_SECONDS)
    try:
        seconds = DEFAULT_SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= DAY:
        raise pytest.UsageError(
            f"--problem-timeout is {given!r}; needs a number of seconds > 0, at most {DAY:g}"
        )
    return seconds


class CrashReports:
    """Runs a watchdog in every process and reads the records of workers that died.

    The controller creates a temporary directory for the records, one file per worker. A replacement
    worker has a new id, so it does not overwrite a record. Without xdist no process reads the
    records, but the watchdog still reports hangs and CUDA errors on stderr.

    Attributes:
        watchdog: The watchdog of this process, returned by the fixture ``watchdog``.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Start the watchdog. Call in ``pytest_configure``, where stderr is not captured yet."""
        seconds = problem_timeout(config)
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own = None if worker else tempfile.TemporaryDirectory(prefix="watchdog-")
        self.directory = Path(worker["watchdog"] if worker else self._own.name)
        name = worker["workerid"] if worker else "main"
        kernel = config.getoption("--kernel", None) or ""
        self.watchdog = Watchdog(self._file(name), seconds, kernel=kernel, end=self._end)
        # The process that reports ends as after Ctrl-C, with the failures so far.
        self._handler: Any = None
        if self._own and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _interrupt)

    def _file(self, worker: str) -> Path:
        return self.directory / f"{worker}.json"

    def _end(self, code: int) -> None:
        """End the process, after removing the directory if this process created it."""
        if self._own:
            self._own.cleanup()
        os._exit(code)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the directory of records to a worker, including replacement workers."""
        node.workerinput["watchdog"] = str(self.directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Prepend how the worker ended, its problem and the replay line to xdist's message."""
        node: Any = report.node  # type: ignore[attr-defined]
        record = Record.read(self._file(node.gateway.id))
        if record is None:
            said = f"{_ending(node)} between problems"
        elif record.state == "running":
            said = record.describe(
                f"{_ending(node)} after {time.time() - record.started:.1f} s in one problem"
            )
        else:
            said = record.describe()
        report.longrepr = f"{said}\n{report.longrepr}"
        # Title the report with the test's name; xdist uses the file's name.
        report.location = (*report.location[:2], crashitem.partition("::")[2] or crashitem)

    def pytest_unconfigure(self) -> None:
        """Stop the watchdog and, in the controller, remove the records."""
        self.watchdog.close()
        if self._own:
            self._own.cleanup()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


def _interrupt(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


def _ending(node: Any) -> str:
    """Describe how a worker's process ended, with its exit code or signal if available."""
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    try:
        code = None if process is None else process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        code = None
    if code is None:
        return "died"
    if code >= 0:
        return f"died with exit code {code}"
    return f"died of signal {-code} ({signal.strsignal(-code)})"
