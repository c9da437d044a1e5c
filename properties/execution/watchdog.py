"""Which problem a process was at when it crashed or hung, and the end of one that can only fail.

A kernel that reads a wild address kills its process, one that never ends holds it, and after some
CUDA errors every later call fails too. So each problem stands in a file of its process while it is
under way, for another process to read; a watchdog ends the process when the problem takes too
long; and an error that leaves the GPU unusable ends it at once.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fa_verify.oracles.problem import Problem

__all__ = ["EXIT_CUDA_ERROR", "EXIT_HANG", "Record", "Watchdog", "sticky_cuda_error"]

# Exit codes of processes that end themselves; pytest's own are 0 to 5, a signal's 128 and more.
EXIT_HANG = 91
EXIT_CUDA_ERROR = 92
# Frames of a hanging thread that its record keeps, innermost first.
FRAMES = 8
# Seconds by which the watchdog may come too late before the process is ended without it: code that
# never gives up Python's lock stops every Python thread, the watchdog too.
GRACE = 60.0


@dataclass(frozen=True)
class Record:
    """A problem under way, as its process wrote it down.

    Args:
        state: "running"; "hang" or "cuda error" where the process has ended itself.
        problem: Its JSON.
        test: The test that runs it, empty outside pytest.
        note: What is done with it.
        started: ``time.time()`` of its start.
        detail: What happened, empty while it is running.
        stack: Where a hanging thread stands, innermost frame first.
        kernel: What --kernel was given, empty for the project's own.
    """

    state: str
    problem: str
    test: str
    note: str
    started: float
    detail: str = ""
    stack: tuple[str, ...] = ()
    kernel: str = ""

    def to_json(self) -> str:
        """One line of JSON, the problem an object in it."""
        head = {item: value for item, value in vars(self).items() if item != "problem"}
        return f'{json.dumps(head)[:-1]}, "problem": {self.problem}}}\n'

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Record | None:
        """The record in a file; None where no problem was under way or the writing was cut off."""
        try:
            fields: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        fields["problem"] = json.dumps(fields["problem"], separators=(",", ":"))
        fields["stack"] = tuple(fields["stack"])
        return cls(**fields)

    def describe(self, heading: str | None = None) -> str:
        """The message: what happened (or ``heading``), the test, the replay line, the stack."""
        kernel = f"--kernel={shlex.quote(self.kernel)} " if self.kernel else ""
        lines = [
            heading or f"{self.state}: {self.detail}",
            f"  test: {self.test or '?'}{', ' if self.note else ''}{self.note}",
            f"  replay: pytest {kernel}--replay={shlex.quote(self.problem)}",
            *(f"  at {line}" for line in self.stack),
        ]
        return "\n".join(lines)


def sticky_cuda_error(error: Exception) -> bool:
    """Whether the CUDA context is lost, after an illegal access or a failed launch, say.

    Asks the GPU and not the error, whose class and text differ between libraries and versions. A
    process that has not imported torch or not used CUDA has no context to lose.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class _Watched(NamedTuple):
    """A problem under way, when it is overdue (monotonic seconds), and the thread it runs in."""

    record: Record
    deadline: float
    thread: int


class Watchdog:
    """Keeps the problem under way in a file, and ends the process where nothing else can.

    The file is empty between problems and holds one ``Record`` during one. It is written only
    when empty, so that a write which is cut off leaves the beginning of a JSON object: no JSON,
    and no mixture of two records.

    Make it where file descriptor 2 is the real stderr, that is, outside of a test whose output is
    captured: a copy of the descriptor made then takes the last words.

    Args:
        path: The file; made or emptied.
        seconds: How long a problem may take, compilation included.
        kernel: What --kernel was given, for replay lines.
        sticky: Whether an exception leaves the process unable to go on.
        end: Ends the process with an exit code, without cleaning up: cleaning up would hang too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        seconds: float = 60.0,
        *,
        kernel: str = "",
        sticky: Callable[[Exception], bool] = sticky_cuda_error,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.seconds = seconds
        self.kernel = kernel
        self._sticky = sticky
        self._end = end
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._stderr = os.dup(2)
        self._watched: _Watched | None = None
        # Held while the watched problem or the file changes: no problem ends while it is found to
        # be overdue.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, problem: Problem, note: str = "") -> Iterator[None]:
        """Records a problem for as long as the block runs, and watches over it.

        What the block launches on a GPU it has to wait for, else an error shows in a later block.
        Inside another block the inner problem stands in the file until it is done.

        Args:
            problem: The problem.
            note: What is done with it, a few words.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        record = Record("running", problem.to_json(), test, note, time.time(), kernel=self.kernel)
        watched = _Watched(record, time.monotonic() + self.seconds, threading.get_ident())
        outer = self._watched
        self._take(watched)
        try:
            yield
        except Exception as error:
            if self._sticky(error):
                with self._lock:
                    self._crash(watched, EXIT_CUDA_ERROR, "cuda error", _first_line(error))
            raise
        finally:
            self._take(outer)

    def close(self) -> None:
        """Stops the watchdog and closes the file; does not remove it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._file)
        os.close(self._stderr)

    def _take(self, watched: _Watched | None) -> None:
        """Makes a problem, or none, the watched one."""
        with self._lock:
            self._watched = watched
            self._write(watched and watched.record)

    def _write(self, record: Record | None) -> None:
        os.ftruncate(self._file, 0)
        if record is not None:
            os.pwrite(self._file, record.to_json().encode(), 0)

    def _crash(
        self, watched: _Watched, code: int, state: str, detail: str, stack: tuple[str, ...] = ()
    ) -> None:
        """Leaves the record for others to read, says it on the real stderr, ends the process."""
        record = dataclasses.replace(watched.record, state=state, detail=detail, stack=stack)
        self._write(record)
        os.write(self._stderr, f"\n{record.describe()}\n".encode())
        self._end(code)

    def _watch(self) -> None:
        """Sleeps until a problem can be overdue, so that its start and its end need not wake it.

        A problem that starts during a sleep of at most ``seconds`` is not overdue before its end.
        """
        sleep = self.seconds
        try:
            while True:
                # A thread of C, which needs no lock of Python's: it prints all stacks and exits.
                faulthandler.dump_traceback_later(sleep + GRACE, exit=True, file=self._stderr)
                if self._closing.wait(sleep):
                    return
                with self._lock:
                    now, watched = time.monotonic(), self._watched
                    sleep = self.seconds if watched is None else watched.deadline - now
                    if watched is not None and sleep <= 0:
                        detail = f"over {self.seconds:g} s in one problem"
                        self._crash(watched, EXIT_HANG, "hang", detail, _stack_of(watched.thread))
                        return
        finally:
            faulthandler.cancel_dump_traceback_later()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _stack_of(thread: int) -> tuple[str, ...]:
    """Where a thread stands, innermost frame first; no source lines, which are read from disk."""
    frames = traceback.walk_stack(sys._current_frames().get(thread))
    summary = traceback.StackSummary.extract(frames, limit=FRAMES, lookup_lines=False)
    return tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in summary)
