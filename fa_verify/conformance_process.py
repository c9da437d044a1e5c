"""The conformance tests in a process of their own, whose end determines no status.

The kernel is imported and called there. It may end the process with any status, so the process
writes how far it came to a file, and the command reads that.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

__all__ = ["Status", "run"]


class Status(IntEnum):
    """The exit status of a run that judges a kernel."""

    HOLDS = 0
    FAILED = 1
    USAGE = 2
    SUITE = 3
    NOT_VERIFIED = 4


# The texts of the file. The last is followed by the status.
_IMPORTING, _RUNNING, _ENDED = "importing", "running", "ended"
# Signals of a crash, which the kernel has caused.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_PASSED_ON = {signal.SIGINT, signal.SIGTERM}
_WAITED_FOR = {*_PASSED_ON, signal.SIGCHLD}
# Seconds in which a process that has got a signal itself says so.
_GRACE = 1.0


def run(arguments: Sequence[str], kernel: str) -> int:
    """Run pytest in another process, and return the status of the command.

    Args:
        arguments: The arguments of pytest.
        kernel: The kernel, for messages.
    """
    with tempfile.TemporaryDirectory(prefix="fa-verify-") as folder:
        reached = Path(folder) / "reached"
        reached.write_text(_IMPORTING, encoding="utf-8")
        # The other process writes a byte for each signal that it gets.
        received, writes = os.pipe()
        os.set_blocking(writes, False)
        # Blocked until the wait, so that no signal is lost; the other process unblocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        try:
            command = [sys.executable, "-m", __name__, str(writes), str(reached), *arguments]
            process = subprocess.Popen(command, pass_fds=(writes,))
            code = _waited(process, received)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(received)
            os.close(writes)
        return _status(reached.read_text(encoding="utf-8"), code, kernel)


def _waited(process: subprocess.Popen[bytes], received: int) -> int:
    """Wait for a process, pass on the signals that it has not got itself, and return its code.

    The terminal, and whoever signals the whole group, signals both processes. A second signal would
    end the other process in its summary.
    """
    while process.poll() is None:
        if not hasattr(signal, "sigtimedwait"):
            process.wait()
            continue
        got = signal.sigtimedwait(_WAITED_FOR, 0.1)
        if got is None or got.si_signo == signal.SIGCHLD:
            continue
        if not _has_byte(received):
            process.send_signal(got.si_signo)
            _has_byte(received)
    return process.returncode


def _has_byte(received: int) -> bool:
    """Read the byte of a signal that the other process gets within a second."""
    ready, _, _ = select.select([received], [], [], _GRACE)
    return bool(ready and os.read(received, 1))


def _status(reached: str, code: int, kernel: str) -> int:
    """Return the status, and say how a process ended that has written none."""
    from fa_verify.properties.running.watchdog import EXIT_CUDA_ERROR, EXIT_HANG

    word, _, ended = reached.partition(" ")
    if word == _ENDED:
        return int(ended)
    if -code in _PASSED_ON:
        return 128 - code
    how = f"status {code}"
    if code < 0:
        how = f"signal {-code} ({signal.strsignal(-code)})"
    if word == _IMPORTING:
        said = f"{kernel} cannot be loaded: it ended the process while it was imported ({how})"
        status = Status.USAGE
    else:
        said = f"{kernel} ended the process of the checks before their verdict ({how})"
        is_crash = -code in _CRASHES or code in (EXIT_HANG, EXIT_CUDA_ERROR)
        status = Status.FAILED if is_crash else Status.SUITE
    print(f"ERROR: {said}", file=sys.stderr)
    return int(status)


class _Reached:
    """Notes that the kernel is loaded, and whether pytest began a session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = False

    def pytest_sessionstart(self) -> None:
        """Note that pytest is configured, which loads the kernel."""
        self.began = True
        # Collections then leave out the objects of torch, of which there are half a million.
        gc.freeze()
        gc.enable()
        self.path.write_text(_RUNNING, encoding="utf-8")


def _main(path: Path, arguments: Sequence[str]) -> int:
    # Registered first, so that it runs last.
    atexit.register(_leave, path)
    gc.disable()
    import pytest

    reached = _Reached(path)
    status = int(pytest.main([*arguments], plugins=[reached]))
    if status == pytest.ExitCode.USAGE_ERROR and not reached.began:
        status = Status.USAGE  # pytest refused an option
    sys.stdout.flush()
    path.write_text(f"{_ENDED} {int(status)}", encoding="utf-8")
    return int(status)


def _leave(path: Path) -> None:
    """End the process if its status is written; freeing all modules would take most of a second."""
    if path.read_text(encoding="utf-8").startswith(_ENDED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    signal.set_wakeup_fd(int(sys.argv[1]), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
    # As for ``python -m pytest``: a kernel may be given as package.module:name.
    sys.path.insert(0, os.getcwd())
    sys.exit(_main(Path(sys.argv[2]), sys.argv[3:]))
