"""Record the current problem of a process, and end the process if it hangs or loses its GPU.

A kernel may crash its process, hang, or cause a CUDA error after which every later call fails too.
Each process therefore writes its current problem to a file, which another process can read after a
crash. The watchdog ends the process if a problem hangs, or after an error that leaves the CUDA
context unusable.

A problem hangs if it makes no progress; a problem on a busy machine only waits for its turn. The
watchdog therefore compares its limit with the CPU time of the process. A deadlock uses no CPU time,
so time by the clock has a limit too, ``WALL`` times as high. Compilation counts towards neither and
has its own limit. The limits grow with the pairs of query rows and keys, which the references read:
on a GPU by as much for each process that shares it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fa_verify.oracles.call import Call
from fa_verify.properties.running.replay_line import replay_line
from fa_verify.properties.running.workers import sharing

__all__ = ["EXIT_CUDA_ERROR", "EXIT_HANG", "Record", "Watchdog", "sticky_cuda_error"]

# Exit codes of processes that end themselves. pytest uses 0 to 5, signals 128 and more.
EXIT_HANG = 91
EXIT_CUDA_ERROR = 92
# Number of frames in a record, innermost first.
FRAMES = 10
# Limit of time by the clock, as a multiple of the limit of CPU time. With four processes per core,
# each gets a quarter of the time.
WALL = 5
# Limit of the time of compilation, as a multiple of the limit of CPU time. A kernel compiles in
# seconds, but 32 processes may compile at once, and an autotuner compiles many kernels.
COMPILATION = 10
# Pairs of a query row and a key that add a second to the limit, for each process that shares the
# problem's GPU: a wait for a GPU is CPU time. One head of 65,536 rows took over 103 s of it on an
# H100 that 16 processes shared.
PAIRS = 1e8
# Looks of the watchdog in the time of the limit, and the most seconds between two of them.
LOOKS = 20
PERIOD = 1.0
# Seconds that faulthandler adds to the limit by the clock before it ends the process. Code that
# never releases the GIL stops every Python thread, including the watchdog.
GRACE = 60.0
# A thread compiles if one of these functions is on its stack: end of the file's name, and name.
COMPILERS = (
    ("triton/compiler/compiler.py", "compile"),
    ("triton/runtime/build.py", "_build"),
    ("torch/_dynamo/convert_frame.py", "_compile"),
    ("torch/_inductor/compile_fx.py", "compile_fx_inner"),
)


@dataclass(frozen=True)
class Record:
    """The current problem of a process.

    Args:
        state: "running"; "hang" or "cuda error" if the process has ended itself.
        problem: The problem as JSON.
        test: The test that runs it; empty outside pytest.
        note: Purpose of the run, in a few words.
        started: ``time.time()`` at its start.
        detail: Description of the hang or error; empty while the problem is running.
        stack: Stack of a hanging thread or of the error, innermost frame first.
        kernel: Value of --fa-kernel; empty for the project's own kernels.
    """

    state: str
    problem: str
    test: str
    note: str
    started: float
    detail: str = ""
    stack: tuple[str, ...] = ()
    kernel: str = ""

    def to_line(self) -> bytes:
        """Return a line: a checksum, and JSON in which the problem is an object."""
        head = {item: value for item, value in vars(self).items() if item != "problem"}
        text = f'{json.dumps(head)[:-1]}, "problem": {self.problem}}}'.encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Record | None:
        """Read a record; return None if no problem was running or the write was interrupted."""
        try:
            line, _, _ = Path(path).read_bytes().partition(b"\n")
            checksum, _, text = line.partition(b" ")
            if int(checksum, 16) != zlib.crc32(text):
                return None
            fields: dict[str, Any] = json.loads(text)
        except (OSError, ValueError):
            return None
        fields["problem"] = json.dumps(fields["problem"], separators=(",", ":"))
        fields["stack"] = tuple(fields["stack"])
        return cls(**fields)

    def describe(self, heading: str | None = None) -> str:
        """Return the failure message: ``heading`` or state and detail, test, replay line, stack."""
        lines = [
            heading or f"{self.state}: {self.detail}",
            f"  test: {self.test or '?'}{', ' if self.note else ''}{self.note}",
            f"  replay: {replay_line(self.problem, self.kernel)}",
            *(f"  at {line}" for line in self.stack),
        ]
        return "\n".join(lines)


def sticky_cuda_error(error: Exception) -> bool:
    """Return whether the CUDA context is lost, for example after an illegal memory access.

    Synchronises the device instead of parsing the error, whose class and text differ between
    libraries and versions. Returns False if the process has not imported torch or not used CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@dataclass
class _Watched:
    """A running problem, the id of its thread, and its seconds so far.

    Args:
        record: The record of the problem.
        thread: The id of the thread that runs it.
        limit: Seconds of CPU time that it may use.
        wall: Seconds by the clock, without compilation.
        cpu: Seconds of CPU time of the process, without compilation.
        compilation: Seconds of compilation by the clock.
    """

    record: Record
    thread: int
    limit: float
    wall: float = 0.0
    cpu: float = 0.0
    compilation: float = 0.0

    def overdue(self) -> str:
        """Return which limit the problem exceeds; empty if none."""
        limit = self.limit
        if min(self.wall, self.cpu) > limit:
            # Several threads may use more CPU time than the clock shows.
            exceeded = f"{round(limit, 2):g} s of CPU time"
        elif self.wall > WALL * limit:
            exceeded = f"{round(WALL * limit, 2):g} s"
        elif self.compilation > COMPILATION * limit:
            exceeded = f"{round(COMPILATION * limit, 2):g} s of compilation"
        else:
            return ""
        return (
            f"over {exceeded} in one problem ({self.cpu:.0f} s of CPU time in {self.wall:.0f} s, "
            f"and {self.compilation:.0f} s of compilation)"
        )


class Watchdog:
    """Records the current problem in a file, and ends the process if it hangs or loses its GPU.

    The first line of the file holds a ``Record`` while a problem runs and is empty otherwise. The
    rest of a longer record may follow it, since emptying the file would take longer than writing.
    After an interrupted write the line may mix two records. Its checksum is then wrong.

    Create the watchdog while file descriptor 2 is the real stderr, not inside a test whose output
    is captured: without ``log`` it duplicates the descriptor to print its last message.

    Args:
        path: The file, which is created or emptied.
        seconds: Limit of the CPU time of a problem in seconds, to which its number of pairs adds.
            The limits of its time by the clock and of its compilation are multiples.
        kernel: Value of --fa-kernel, for replay lines.
        log: The file for its last message and the stacks of faulthandler; stderr if None.
        sticky: Returns whether the process cannot continue after an exception.
        end: Ends the process with an exit code and without cleaning up, which could hang too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        seconds: float = 60.0,
        *,
        kernel: str = "",
        log: str | os.PathLike[str] | None = None,
        sticky: Callable[[Exception], bool] = sticky_cuda_error,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.seconds = seconds
        self.kernel = kernel
        self._sticky = sticky
        self._end = end
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.log = os.dup(2) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        self._watched: _Watched | None = None
        # Held while the watched problem or the file changes, so that a problem cannot end while
        # the watchdog reports it.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, problem: Call, note: str = "") -> Iterator[None]:
        """Record a problem and limit its time while the block runs.

        The block must synchronise with the GPU before it ends, or an error is attributed to a later
        block. In nested blocks the file holds the innermost problem, and time counts towards that
        problem alone.

        Args:
            problem: The problem.
            note: Purpose of the run, in a few words.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        record = Record("running", problem.to_json(), test, note, time.time(), kernel=self.kernel)
        pairs = problem.pairs
        pairs *= sharing(os.environ) if problem.device == "cuda" else 1
        watched = _Watched(record, threading.get_ident(), self.seconds + pairs / PAIRS)
        outer = self._watched
        self._take(watched)
        try:
            yield
        except Exception as error:
            if self._sticky(error):
                with self._lock:
                    stack = _stack_of(traceback.walk_tb(error.__traceback__))
                    self._crash(watched, EXIT_CUDA_ERROR, "cuda error", _first_line(error), stack)
            raise
        finally:
            self._take(outer)

    def close(self) -> None:
        """Stop the watchdog and close the file without removing it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._file)
        os.close(self.log)

    def _take(self, watched: _Watched | None) -> None:
        """Set the watched problem; None if no problem runs."""
        with self._lock:
            self._watched = watched
            self._write(None if watched is None else watched.record)

    def _write(self, record: Record | None) -> None:
        os.pwrite(self._file, b"\n" if record is None else record.to_line(), 0)

    def _crash(
        self, watched: _Watched, code: int, state: str, detail: str, stack: tuple[str, ...]
    ) -> None:
        """Write the record to the file and to the log, then end the process."""
        record = dataclasses.replace(watched.record, state=state, detail=detail, stack=stack)
        self._write(record)
        os.write(self.log, f"\n{record.describe()}\n".encode())
        self._end(code)

    def _watch(self) -> None:
        """Add up the time of the problem under way until it exceeds a limit.

        Looks at intervals instead of being woken when problems start and end, which would slow
        every problem. Time since the last look counts if the problem was under way then. It counts
        as compilation if a thread compiles now.
        """
        period = min(PERIOD, self.seconds / LOOKS)
        before: _Watched | None = None
        wall, cpu = time.monotonic(), time.process_time()
        try:
            while True:
                # A C thread that does not need the GIL prints all stacks and exits.
                limit = self.seconds if before is None else before.limit
                faulthandler.dump_traceback_later(WALL * limit + GRACE, exit=True, file=self.log)
                if self._closing.wait(period):
                    return
                with self._lock:
                    last_wall, last_cpu = wall, cpu
                    wall, cpu = time.monotonic(), time.process_time()
                    last, before = before, self._watched
                    if before is None or before is not last:
                        continue
                    compiling = _compiling()
                    if compiling is None:
                        before.wall += wall - last_wall
                        before.cpu += cpu - last_cpu
                    else:
                        before.compilation += wall - last_wall
                    if detail := before.overdue():
                        frame = compiling or sys._current_frames().get(before.thread)
                        stack = _stack_of(reversed([*traceback.walk_stack(frame)]))
                        self._crash(before, EXIT_HANG, "hang", detail, stack)
                        return
        finally:
            faulthandler.cancel_dump_traceback_later()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _compiling() -> FrameType | None:
    """Return the frame of a compiler, in any thread: autograd and pools start threads too."""
    for innermost in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(innermost):
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if any(file.endswith(end) and name == function for end, function in COMPILERS):
                return frame
    return None


def _stack_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, ...]:
    """Return the last frames, innermost first, without source lines (read from disk)."""
    summary = traceback.StackSummary.extract(iter(frames), limit=-FRAMES, lookup_lines=False)
    return tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(summary))
