"""A pytest plugin: a worker that dies names its problem in the report of the test that it ran.

``plugin`` registers it: ``config.pluginmanager.register(CrashReports(config))``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from fa_verify.properties.execution.watchdog import Record, Watchdog

__all__ = ["DEFAULT_SECONDS", "CrashReports", "problem_timeout"]

DEFAULT_SECONDS = 60.0
DAY = 86_400.0


def problem_timeout(config: pytest.Config) -> float:
    """Seconds that one problem may take: the option --problem-timeout.

    Raises:
        pytest.UsageError: It is no number of seconds from above 0 to a day.
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
    """Keeps a watchdog in every process, and reads those of workers that died.

    The records lie in a temporary directory of the controller, one file a worker. A worker that
    replaces another has an id of its own, so no record is overwritten. Without xdist there is
    nobody to read them: hangs and CUDA errors are still said on stderr.

    Attributes:
        watchdog: The watchdog of this process, for the fixture of that name.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Is to be called in ``pytest_configure``, where stderr is not captured."""
        seconds = problem_timeout(config)
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own = None if worker else tempfile.TemporaryDirectory(prefix="watchdog-")
        self.directory = Path(worker["watchdog"] if worker else self._own.name)
        name = worker["workerid"] if worker else "main"
        kernel = config.getoption("--kernel", None) or ""
        self.watchdog = Watchdog(self._file(name), seconds, kernel=kernel, end=self._end)

    def _file(self, worker: str) -> Path:
        return self.directory / f"{worker}.json"

    def _end(self, code: int) -> None:
        """Ends the process; without xdist nobody else would remove the directory."""
        if self._own:
            self._own.cleanup()
        os._exit(code)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker, also one that replaces another, where records lie."""
        node.workerinput["watchdog"] = str(self.directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Puts how the worker ended, the problem and its replay line before xdist's message."""
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
        # The title of the report: xdist gives it the file's name.
        report.location = (*report.location[:2], crashitem.partition("::")[2] or crashitem)

    def pytest_unconfigure(self) -> None:
        """Stops the watchdog; the controller removes the records."""
        self.watchdog.close()
        if self._own:
            self._own.cleanup()


def _ending(node: Any) -> str:
    """How a worker's process ended, as far as xdist's connection to it lets one know."""
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
