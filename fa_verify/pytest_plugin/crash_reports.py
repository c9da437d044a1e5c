"""A pytest plugin that reports which problem a pytest-xdist worker was running when it died.

``fa_verify.pytest_plugin.running`` registers it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.properties.running.watchdog import FRAMES, Record, Watchdog
from fa_verify.pytest_plugin.options import DEFAULT_SECONDS, number_of

if TYPE_CHECKING:
    from fa_verify.pytest_plugin.smallest_death import Death

__all__ = ["CrashReports", "problem_timeout"]

DAY = 86_400.0
# The limit of a problem that is tried again, as a multiple of the first. On a busy machine a kernel
# takes several times as long.
AGAIN = 5
# A kernel that ends every worker does not end the run, if its frames differ.
MOST_RESTARTS = "1000"
_RUNS_AGAIN = "runs again"
_SUITE = Path(__file__).parents[1]
_LIBRARIES = (
    str(_SUITE),
    str((_SUITE / "conformance").resolve()),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
)


def problem_timeout(config: pytest.Config) -> float:
    """Return the option --fa-problem-timeout, in seconds.

    Raises:
        pytest.UsageError: The value is not a number, not above 0, or more than a day.
    """
    seconds = number_of(config, "problem-timeout", "seconds", DAY)
    return DEFAULT_SECONDS if seconds is None else seconds


class CrashReports:
    """Runs a watchdog in every process and reads the records of workers that died.

    The controller creates a temporary directory for the records and logs, one file of each per
    worker. A replacement worker has a new id, so it does not overwrite a record. Without xdist no
    process reads the records, but the watchdog still reports hangs and CUDA errors on stderr.

    The controller stops the run when the same frame ends two workers in a row, unless
    --max-worker-restart is given. A test that hangs is run once more with a longer limit, because
    its problem may only be slow. xdist ignores deaths of workers in ``-x`` and ``--maxfail``; the
    controller counts them.

    Attributes:
        watchdog: The watchdog of this process, returned by the fixture ``watchdog``.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Start the watchdog. Call in ``pytest_configure``, where stderr is not captured yet."""
        seconds = self._seconds = problem_timeout(config)
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own = None if worker else tempfile.TemporaryDirectory(prefix="watchdog-")
        self.directory = Path(worker["watchdog"] if worker else self._own.name)
        name = worker["workerid"] if worker else "main"
        kernel = config.getoption("--fa-kernel", None) or ""
        log = self._log(name) if worker else None
        self.watchdog = Watchdog(self._file(name), seconds, kernel=kernel, log=log, end=self._end)
        self._is_worker = worker is not None
        self._config = config
        self._maxfail: int = config.getoption("maxfail", None) or 0
        self._failures = 0
        # Whether a worker has died, the frame that ended the last one, and why the run stops.
        self._died = False
        self._frame = ""
        self._stop = ""
        # Tests that hung, and were run again.
        self._again: set[str] = set()
        # The smallest calls that ended workers, by the frame and the kind of call.
        self._deaths: dict[tuple[str, str], Death] = {}
        # None without xdist.
        self._restarts = getattr(config.option, "maxworkerrestart", MOST_RESTARTS)
        if self._restarts is None:
            config.option.maxworkerrestart = MOST_RESTARTS
        # The process that reports ends as after Ctrl-C, with the failures so far.
        self._handler: Any = None
        if self._own and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _interrupt)

    def _file(self, worker: str) -> Path:
        return self.directory / f"{worker}.json"

    def _log(self, worker: str) -> Path:
        return self.directory / f"{worker}.log"

    def _tried_again(self) -> Path:
        """The file that lists the tests that run again, one on a line."""
        return self.directory / "again"

    def _end(self, code: int) -> None:
        """End the process, after removing the directory if this process created it."""
        if self._own:
            self._own.cleanup()
        os._exit(code)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the directory of records to a worker, including replacement workers."""
        node.workerinput["watchdog"] = str(self.directory)

    def pytest_sessionstart(self) -> None:
        """Send the stack of a crash to the log of a worker, after pytest chose the real stderr."""
        if self._is_worker:
            faulthandler.enable(self.watchdog.log, all_threads=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Raise the limit for a test that hung in another worker."""
        again = self._tried_again()
        is_again = again.exists() and item.nodeid in again.read_text("utf-8").splitlines()
        self.watchdog.seconds = self._seconds * (AGAIN if is_again else 1)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Name the outcome of a test that will run again."""
        return (_RUNS_AGAIN, "R", "RUNS AGAIN") if report.outcome == _RUNS_AGAIN else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: Any) -> None:
        """Prepend how the worker ended, its problem and the replay line to xdist's message.

        A test that hangs for the first time runs again.
        """
        node: Any = report.node  # type: ignore[attr-defined]
        record = Record.read(self._file(node.gateway.id))
        if record is not None and record.state == "hang" and crashitem not in self._again:
            self._again.add(crashitem)
            self._tried_again().write_text("\n".join(self._again), "utf-8")
            # xdist's other schedulers take no test back.
            with suppress(NotImplementedError):
                sched.mark_test_pending(crashitem)
                report.outcome = _RUNS_AGAIN  # type: ignore[assignment]
                return
        stack = _of_kernel((record and record.stack) or _dumped(self._log(node.gateway.id)))
        if record is not None:
            record = dataclasses.replace(record, stack=stack)
        if record is None:
            said = "\n".join(
                (f"{_ending(node)} between problems", *(f"  at {line}" for line in stack))
            )
        elif record.state == "running":
            said = record.describe(
                f"{_ending(node)} after {time.time() - record.started:.1f} s in one problem"
            )
        else:
            said = record.describe()
            if crashitem in self._again and record.state == "hang":
                said += f"\n  It hung before, with the limit of {self._seconds:g} s."
        own = (line for line in stack if not line.startswith(_LIBRARIES))
        before, self._frame = self._frame, next(own, next(iter(stack), ""))
        lines = [] if record is None else self._smallest(record, _ending(node))
        report.longrepr = "\n".join((*lines, f"{said}\n{report.longrepr}"))
        # Title the report with the test's name; xdist uses the file's name.
        report.location = (*report.location[:2], crashitem.partition("::")[2] or crashitem)
        self._died = True
        if self._restarts is None and self._frame and self._frame == before:
            self._stop = (
                f"two workers in a row ended at {self._frame}; "
                f"--max-worker-restart={MOST_RESTARTS} runs the other tests"
            )

    def _smallest(self, record: Record, ending: str) -> Sequence[str]:
        """Describe the smallest call that ends a process at this frame, sought once for each."""
        if record.state == "cuda error" or not record.kernel:
            return ()
        # A process that reports no death needs no kinds of calls.
        from fa_verify.pytest_plugin.smallest_death import death_of
        from fa_verify.session import options_of

        of_kind = self._frame, call_from_json(record.problem).kind
        if of_kind not in self._deaths:
            how = record.state if record.state == "hang" else ending
            self._deaths[of_kind] = death_of(options_of(self._config), record.problem, how)
        death = self._deaths[of_kind]
        return death.lines if death.explains(record.problem) else ()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count failures, and stop the run once the last one is reported."""
        self._failures += report.failed
        if self._died and 0 < self._maxfail <= self._failures:
            self._stop = f"stopping after {self._failures} failures"
        if self._stop:
            pytest.exit(self._stop)

    def pytest_unconfigure(self) -> None:
        """Stop the watchdog and, in the controller, remove the records."""
        self.watchdog.close()
        if self._own:
            self._own.cleanup()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


def _interrupt(number: int, frame: object) -> None:
    # A shell without job control starts background jobs with SIGINT ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _dumped(log: Path) -> tuple[str, ...]:
    """Return the stack of the main thread, or of the only thread, that faulthandler wrote."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    _, _, last = text.rpartition("(most recent call first):")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    return tuple(f"{file}:{line} in {name}" for file, line, name in frames[:FRAMES])


def _of_kernel(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames down to the kernel's outermost one; all if none is outside of libraries."""
    own = [i for i, line in enumerate(stack) if not line.startswith(_LIBRARIES)]
    return stack[: own[-1] + 1] if own else stack


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
