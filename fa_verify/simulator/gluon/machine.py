"""A simulated GPU for warp-specialised kernels: programs, partitions, barriers and copies.

One partition runs at a time. Partitions switch wherever they synchronise, in an order that a seed
determines. Asynchronous operations complete late: a copy at a random time, a product when it is
waited for, at which time its operands are compared with their bytes at the time of issue. A result
that a kernel uses without waiting for it is therefore missing, or is reported as a race.
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
# Probabilities per turn that the order of partitions changes and that a copy arrives. The order
# stays for a while, so that some partitions fall as far behind as barriers permit. The order of
# programs changes rarely, so that a program that begins last may end first.
_CHANGES, _COPIES = 0.1, 0.05
_PROGRAM_CHANGES = 0.001


class DeadlockError(RuntimeError):
    """Every partition waits, and no pending operation can end a wait."""


class RaceError(RuntimeError):
    """A read and a write of the same memory are not ordered."""


class Barrier:
    """An mbarrier. A phase ends when all arrivals and all expected bytes have been counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        """Set the number of arrivals that end a phase."""
        self.count = self.left = count

    def arrive(self, count: int = 1) -> None:
        """Count ``count`` arrivals.

        Raises:
            RaceError: The barrier is not initialised, or there are more arrivals than it expects.
        """
        if not self.count:
            raise RaceError(f"{self.name} is used before it is initialised")
        self.left -= count
        if self.left < 0:
            raise RaceError(f"{self.name}: more than the {self.count} expected arrivals")
        self._end()

    def expect(self, size: int) -> None:
        """Add bytes to expect, and count one arrival."""
        self.bytes += size
        self.arrive()

    def come(self, size: int) -> None:
        """Count expected bytes that have been copied."""
        self.bytes -= size
        self._end()

    def _end(self) -> None:
        if not self.left and not self.bytes:
            self.phase ^= 1
            self.left = self.count

    def has_ended(self, phase: int) -> bool:
        """Return whether the phase with a parity has ended; phase 1 has before the first phase."""
        return self.phase != phase


class Product:
    """An asynchronous matrix product with operands in shared memory."""

    def __init__(self, operands: Sequence[Array], make: Callable[..., Any]) -> None:
        self._operands = operands
        self._seen = [x.copy() for x in operands]
        self._make = make
        self.result: Any = None
        self.is_done = False

    def finish(self) -> None:
        """Compute the result.

        Raises:
            RaceError: An operand has changed since the product was issued.
        """
        for now, then in zip(self._operands, self._seen, strict=True):
            if now.tobytes() != then.tobytes():
                raise RaceError("a tile is written while a product reads it")
        self.result = self._make(*self._seen)
        self.is_done = True


def _closed() -> threading.Lock:
    """Return an acquired lock, which another thread releases."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Program:
    """A running program and its partitions."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        # Programs with a lower rank run first.
        self.rank = 0.0
        self.partitions: list[_Partition] = []


class _Partition:
    """A partition (group of warps) of a program: a thread and its pending operations."""

    def __init__(self, number: int, program: _Program) -> None:
        self.name = f"partition {number}{program.name}"
        self.program = program
        self.turn = _closed()
        self.waits_for: Callable[[], bool] = lambda: True
        self.reason = "its first turn"
        self.is_over = False
        self.products: list[Product] = []
        self.unfenced: list[Array] = []
        # Whether warps have stored to shared or global memory since the last thread barrier.
        self.stored = {"shared": False, "global": False}
        # Address and value of the partition's last ``look``.
        self.looked: tuple[int, object] | None = None


class Machine:
    """Runs the programs of a launch: schedules their partitions and the pending copies.

    Args:
        seed: Seed of the schedule.
        resumed: Called with the number of a program before one of its partitions runs.
    """

    def __init__(self, seed: str, resumed: Callable[[int], None] = lambda program: None) -> None:
        """Start without programs."""
        self._random = random.Random(seed)
        self._resumed = resumed
        # In the order of their priority.
        self._running: list[_Partition] = []
        self._copies: list[tuple[_Program, Callable[[], None]]] = []
        self._threads: list[threading.Thread] = []
        self._main = _closed()
        self._has_ended = False
        self._error: BaseException | None = None
        self._now: _Partition | None = None

    @property
    def now(self) -> _Partition:
        """The running partition."""
        assert self._now is not None, "outside of a program"
        return self._now

    def run(self, programs: Sequence[Callable[[], None]], at_once: int = 1) -> None:
        """Run all programs to their ends, started in their order, ``at_once`` at a time.

        Raises:
            DeadlockError: Programs or partitions wait for each other.
            RaceError: Accesses to memory are not ordered.
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
        """Choose the order of programs: all equal, random, or youngest first."""
        kind = self._random.randrange(3)
        for program in programs:
            program.rank = (0.0, self._random.random(), -program.number)[kind]

    def _next(self) -> _Partition | None:
        """Complete copies until a partition can run and return it; None on a deadlock."""
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
        """Start a partition of a program. The first one runs the program until it splits."""
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
            # NumPy's error state is per thread.
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
            raise RaceError(f"{copies} copies into shared memory are pending as the program ends")

    def split(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions concurrently to their ends: the first here, the others as partitions."""
        others = [self._begin(self.now.program, run) for run in functions[1:]]
        functions[0]()
        self.pause(lambda: all(x.is_over for x in others), "the others' ends")

    def pause(self, until: Callable[[], bool] = lambda: True, reason: str = "a turn") -> None:
        """Let other partitions run, at least until a condition holds."""
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
        """Let other partitions run before a read of memory that they write.

        If the value equals that of the partition's last look at the same place, wait until it
        changes. This detects polling loops that no write will end.
        """
        self.pause()
        partition = self.now
        before = read()
        if partition.looked == (place, before):
            self.pause(lambda: read() != before, "memory that no partition writes")
        partition.looked = place, read()

    def wait(self, barrier: Barrier, phase: int) -> None:
        """Wait until the phase with a parity has ended.

        Raises:
            RaceError: ``phase`` is not 0 or 1.
        """
        if phase not in (0, 1):
            raise RaceError(f"phase {phase} of {barrier.name} is waited for; needs 0 or 1")
        self.pause(lambda: barrier.has_ended(phase), f"phase {phase} of {barrier.name}")

    def copy(self, target: Array, values: Array, size: int, barrier: Barrier) -> None:
        """Write a tile at a later time, then signal the barrier; until then the tile is NaN."""
        poison(target)

        def arrive() -> None:
            target[...] = values
            barrier.come(size)

        self._copies.append((self.now.program, arrive))
        self.pause()

    def wrote(self, target: Array) -> None:
        """Record an ordinary store, which asynchronous operations see only after a fence."""
        self.now.unfenced.append(target)
        self.now.stored["shared"] = True

    def wrote_globally(self) -> None:
        """Record a store of a tile to global memory."""
        self.now.stored["global"] = True

    def fence(self) -> None:
        """Make earlier stores of the partition visible to asynchronous operations."""
        self.now.unfenced.clear()
        self.now.stored["shared"] = False

    def thread_barrier(self) -> None:
        """Let the warps of the partition wait for each other."""
        self.now.stored = dict.fromkeys(self.now.stored, False)

    def check_announced(self, space: str) -> None:
        """Check that the warps have stored all that one of them announces.

        One warp arrives on a barrier or sets a flag. Without a thread barrier, another warp of the
        partition may be behind, with its part of a tile still to store.

        Raises:
            RaceError: The partition has stored to this space without a thread barrier since.
        """
        if self.now.stored[space]:
            raise RaceError(
                f"{self.now.name} has no thread barrier between a store to {space} memory and the "
                "announcement of it"
            )

    def check_fenced(self, source: Array) -> None:
        """Check that an asynchronous operation may read a tile.

        Raises:
            RaceError: A partition has stored to the tile without a fence since.
        """
        for partition in self.now.program.partitions:
            if any(np.may_share_memory(source, x) for x in partition.unfenced):
                raise RaceError(
                    f"{partition.name} has no fence between a store and an asynchronous read of it"
                )

    def issue(self, product: Product) -> None:
        """Append a product to the partition's pending products."""
        self.now.products.append(product)

    def finish_products(self, left: int) -> None:
        """Finish the pending products in order, except the last ``left``."""
        self.pause()
        products = self.now.products
        while len(products) > left:
            products.pop(0).finish()


def poison(target: Array) -> None:
    """Fill an array with NaN of any type (bytes 0xFF)."""
    target.view(np.uint8)[...] = 0xFF
