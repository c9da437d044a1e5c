"""A GPU as far as warp-specialised kernels can tell: programs, partitions, barriers, copies.

Partitions of programs run one at a time and change places wherever they synchronise, in an order
that a seed decides. What is asynchronous happens as late as it may: a copy when the order says so,
a product when it is waited for, with the bytes of its operands looked at twice. So what a kernel
relies on without having waited for it is missing, or is noticed as a race.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Barrier", "DeadlockError", "Machine", "Product", "RaceError", "poison"]

Array = npt.NDArray[Any]
# How often, in turns, those who go first change, and a copy comes. Whoever goes first stays first
# for a while, so that others fall as far behind as barriers let them. Which programs do changes
# seldom, so that one that begins last may end first.
_CHANGES, _COPIES = 0.1, 0.05
_PROGRAM_CHANGES = 0.001


class DeadlockError(RuntimeError):
    """Every partition waits, and nothing is under way that could end it."""


class RaceError(RuntimeError):
    """Something reads what is not ordered behind, or before, what writes it."""


class Barrier:
    """An mbarrier: it ends a phase when all have arrived and all bytes have come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        """So many arrivals end a phase."""
        self.count = self.left = count

    def arrive(self, count: int = 1) -> None:
        """Of so many at once.

        Raises:
            RaceError: They are more than it counts, or it counts none yet.
        """
        if not self.count:
            raise RaceError(f"{self.name} is used before it is initialised")
        self.left -= count
        if self.left < 0:
            raise RaceError(f"{self.name}: more arrive than the {self.count} it counts")
        self._end()

    def expect(self, size: int) -> None:
        """Bytes that will come, and an arrival."""
        self.bytes += size
        self.arrive()

    def come(self, size: int) -> None:
        """Bytes that were expected."""
        self.bytes -= size
        self._end()

    def _end(self) -> None:
        if not self.left and not self.bytes:
            self.phase ^= 1
            self.left = self.count

    def has_ended(self, phase: int) -> bool:
        """Whether the phase of that parity is over: the one before the first counts as such."""
        return self.phase != phase


class Product:
    """One asynchronous product: its operands in shared memory, and how it is made of them."""

    def __init__(self, operands: Sequence[Array], make: Callable[..., Any]) -> None:
        self._operands = operands
        self._seen = [x.copy() for x in operands]
        self._make = make
        self.result: Any = None
        self.is_done = False

    def finish(self) -> None:
        """Makes the result.

        Raises:
            RaceError: An operand is no longer what it was.
        """
        for now, then in zip(self._operands, self._seen, strict=True):
            if now.tobytes() != then.tobytes():
                raise RaceError("a tile is written while a product reads it")
        self.result = self._make(*self._seen)
        self.is_done = True


def _closed() -> threading.Lock:
    """A lock that a thread waits at until another one releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Program:
    """One that runs, and those of its partitions that have begun."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        # The lowest goes first.
        self.rank = 0.0
        self.partitions: list[_Partition] = []


class _Partition:
    """One of the groups of warps of a program: a thread, and what it has under way."""

    def __init__(self, number: int, program: _Program) -> None:
        self.name = f"partition {number}{program.name}"
        self.program = program
        self.turn = _closed()
        self.waits_for: Callable[[], bool] = lambda: True
        self.reason = "its first turn"
        self.is_over = False
        self.products: list[Product] = []
        self.unfenced: list[Array] = []
        # What it has seen of memory, and where, when it last looked.
        self.looked: tuple[int, object] | None = None


class Machine:
    """What a launch has: programs, their partitions, what they wrote last, copies under way."""

    def __init__(self, seed: str, resumed: Callable[[int], None] = lambda program: None) -> None:
        """``resumed`` is told which program it is that goes on."""
        self._random = random.Random(seed)
        self._resumed = resumed
        # Who goes first stands first.
        self._running: list[_Partition] = []
        self._copies: list[tuple[_Program, Callable[[], None]]] = []
        self._threads: list[threading.Thread] = []
        self._main = _closed()
        self._has_ended = False
        self._error: BaseException | None = None
        self._now: _Partition | None = None

    @property
    def now(self) -> _Partition:
        """The partition that runs."""
        assert self._now is not None, "outside of a program"
        return self._now

    def run(self, programs: Sequence[Callable[[], None]], at_once: int = 1) -> None:
        """Runs all programs to their ends, begun in their order, so many at a time.

        Raises:
            DeadlockError: They, or their partitions, wait for each other.
            RaceError: What they do is not ordered.
        """
        named = len(programs) > 1
        left = [_Program(i, f" of program {i}" if named else "") for i in range(len(programs))]
        left.reverse()
        self._rank(left)
        while self._error is None and (left or self._running):
            while left and len({x.program.number for x in self._running}) < at_once:
                self._begin(left[-1], programs[left.pop().number])
            if ready := self._next():
                ready.turn.release()
                self._main.acquire()
        self._has_ended = True
        for partition in self._running:
            partition.turn.release()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _rank(self, programs: Sequence[_Program]) -> None:
        """Decides which of them go first: all alike, in some order, or the youngest."""
        kind = self._random.randrange(3)
        for program in programs:
            program.rank = (0.0, self._random.random(), -program.number)[kind]

    def _next(self) -> _Partition | None:
        """The partition that runs next, after the copies that come before; None on a deadlock."""
        while True:
            if self._random.random() < _PROGRAM_CHANGES:
                self._rank([x.program for x in self._running])
            if self._random.random() < _CHANGES:
                self._random.shuffle(self._running)
            self._running.sort(key=lambda x: x.program.rank)
            ready = next((x for x in self._running if x.waits_for()), None)
            if self._copies and (ready is None or self._random.random() < _COPIES):
                self._copies.pop(self._random.randrange(len(self._copies)))[1]()
            elif ready is not None:
                self._now = ready
                self._resumed(ready.program.number)
                return ready
            else:
                waits = (f"{x.name} waits for {x.reason}" for x in self._by_name())
                self._error = DeadlockError("; ".join(waits))
                return None

    def _by_name(self) -> list[_Partition]:
        return sorted(self._running, key=lambda x: (x.program.number, x.name))

    def _begin(self, program: _Program, run: Callable[[], None]) -> _Partition:
        """One more partition of a program; the first one is the program until it splits."""
        partition = _Partition(len(program.partitions), program)
        program.partitions.append(partition)
        self._running.insert(self._random.randrange(len(self._running) + 1), partition)
        thread = threading.Thread(target=self._thread, args=(partition, run), daemon=True)
        self._threads.append(thread)
        thread.start()
        return partition

    def _thread(self, partition: _Partition, run: Callable[[], None]) -> None:
        partition.turn.acquire()
        try:
            # NumPy's is of the thread.
            with np.errstate(all="ignore"):
                if self._error is None:
                    run()
            if self._error is None:
                self._check_end(partition)
        except BaseException as error:
            self._error = self._error or error
        partition.is_over = True
        if self._error is None:
            self._running.remove(partition)
        if not self._has_ended:
            self._main.release()

    def _check_end(self, partition: _Partition) -> None:
        program = partition.program
        copies = sum(x is program for x, _ in self._copies)
        if copies and partition is program.partitions[0]:
            raise RaceError(f"{copies} copies into shared memory outlive the program")

    def split(self, functions: Sequence[Callable[[], None]]) -> None:
        """Runs them side by side to their ends: the first here, the others as partitions."""
        others = [self._begin(self.now.program, run) for run in functions[1:]]
        functions[0]()
        self.pause(lambda: all(x.is_over for x in others), "the others' ends")

    def pause(self, until: Callable[[], bool] = lambda: True, reason: str = "a turn") -> None:
        """Lets others run, at least until something holds."""
        partition = self.now
        partition.waits_for, partition.reason = until, reason
        ready = self._next()
        if ready is partition:
            return
        (self._main if ready is None else ready.turn).release()
        partition.turn.acquire()
        if self._error is not None:
            raise self._error

    def look(self, place: int, read: Callable[[], object]) -> None:
        """Before memory is read that others write: lets them run.

        Who finds there what it found when it last looked waits until that changes, so that a loop
        that nobody will end is noticed.
        """
        self.pause()
        partition = self.now
        before = read()
        if partition.looked == (place, before):
            self.pause(lambda: read() != before, "memory that nobody writes")
        partition.looked = place, read()

    def wait(self, barrier: Barrier, phase: int) -> None:
        """Until the phase of that parity is over.

        Raises:
            RaceError: It is no parity.
        """
        if phase not in (0, 1):
            raise RaceError(f"phase {phase} of {barrier.name} is waited for; needs 0 or 1")
        self.pause(lambda: barrier.has_ended(phase), f"phase {phase} of {barrier.name}")

    def copy(self, target: Array, values: Array, size: int, barrier: Barrier) -> None:
        """Writes a tile some time, and then tells the barrier; until then nobody knows it."""
        poison(target)

        def arrive() -> None:
            target[...] = values
            barrier.come(size)

        self._copies.append((self.now.program, arrive))
        self.pause()

    def wrote(self, target: Array) -> None:
        """By ordinary stores: seen by what is asynchronous behind a fence alone."""
        self.now.unfenced.append(target)

    def fence(self) -> None:
        """What was stored before is seen by what is asynchronous."""
        self.now.unfenced.clear()

    def check_fenced(self, source: Array) -> None:
        """Before something asynchronous reads it.

        Raises:
            RaceError: Somebody has stored there, and no fence since.
        """
        for partition in self.now.program.partitions:
            if any(np.may_share_memory(source, x) for x in partition.unfenced):
                raise RaceError(f"{partition.name} has no fence behind a store that is read then")

    def issue(self, product: Product) -> None:
        """Behind those under way."""
        self.now.products.append(product)

    def finish_products(self, left: int) -> None:
        """All but the last ones, in order."""
        self.pause()
        products = self.now.products
        while len(products) > left:
            products.pop(0).finish()


def poison(target: Array) -> None:
    """NaN, of any type, in place of what is there."""
    target.view(np.uint8)[...] = 0xFF
