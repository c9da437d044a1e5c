"""Two threads that take turns: each runs up to its next operator of PyTorch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["in_turns"]

# Looks at a thread that has the turn, and seconds between them. One that stands still waits for a
# lock that the other one holds.
_LOOKS, _SECONDS = 5, 0.1
# Modules that run kernels on a CPU, with one state for all threads: no turn ends in them.
_ONE_STATE = ("triton/runtime/interpreter.py", "/simulator/")
_Result = TypeVar("_Result")


def in_turns(first: Callable[[], _Result], second: Callable[[], _Result]) -> _Result:
    """Call two functions in threads that take turns at their operators; return the first's result.

    Turns interleave calls of any speed, and in the same order in every run. Operators of other
    threads, such as those of a backward on a GPU, end no turn.

    Raises:
        BaseException: One of them raises, the first function's exception before the second's.
    """
    turns = _Turns()
    results: list[_Result] = []
    raised: dict[int, BaseException] = {}

    def run(number: int, function: Callable[[], _Result]) -> None:
        try:
            turns.wait(number)
            with _Mode(turns, number):
                found = function()
            if not number:
                results.append(found)
        except BaseException as error:  # the caller's thread raises it
            raised[number] = error
        finally:
            turns.end()

    turns.threads = [
        threading.Thread(target=run, args=x, daemon=True) for x in enumerate((first, second))
    ]
    for thread in turns.threads:
        thread.start()
    for thread in turns.threads:
        thread.join()
    for number in sorted(raised):
        raise raised[number]
    return results[0]


class _Turns:
    """The turns of two threads, until one has ended or waits for the other."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._turn = 0
        self._is_over = False

    def wait(self, number: int) -> None:
        """Wait for the turn of a thread."""
        with self._changed:
            looks: list[object] = []
            while not self._is_over and self._turn != number:
                if self._changed.wait(_SECONDS):
                    continue
                looks = [*looks, self._place(1 - number)][-_LOOKS:]
                if len(looks) == _LOOKS and len({*looks}) == 1:
                    self.end()

    def pass_on(self, number: int) -> None:
        """End the turn of a thread, and wait for its next one."""
        with self._changed:
            self._turn = 1 - number
            self._changed.notify_all()
        self.wait(number)

    def end(self) -> None:
        """Let both threads go on."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _place(self, number: int) -> object:
        """Return the place in the code that a thread is at."""
        frame = sys._current_frames().get(self.threads[number].ident or 0)
        return frame and (id(frame), frame.f_lasti)


class _Mode(TorchDispatchMode):
    """Ends the turn of its thread before each operator."""

    # As ``GuardBands``: compiled code stays compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the mode does not disable compiled code."""
        return True

    def __init__(self, turns: _Turns, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._turns, self._number = turns, number
        self._own = threading.get_ident()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of the base class
        if threading.get_ident() == self._own and not _is_in_a_kernel():
            self._turns.pass_on(self._number)
        return func(*args, **(kwargs or {}))


def _is_in_a_kernel() -> bool:
    """Return whether the caller is inside of a kernel on a CPU."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if any(x in frame.f_code.co_filename for x in _ONE_STATE):
            return True
    return False
