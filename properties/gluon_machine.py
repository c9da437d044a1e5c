"""A multiprocessor as far as warp-specialised kernels can tell: partitions, barriers, copies.

Partitions of a program run one at a time and change places wherever they synchronise, in an order
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
# for a while, so that others fall as far behind as barriers let them.
_CHANGES, _COPIES = 0.1, 0.05


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


class _Partition:
    """One of the groups of warps: a thread, and what it has under way."""

    def __init__(self, number: int, run: Callable[[], None]) -> None:
        self.name = f"partition {number}"
        self.run = run
        self.turn = threading.Semaphore(0)
        self.waits_for: Callable[[], bool] = lambda: True
        self.reason = "its first turn"
        self.is_over = False
        self.products: list[Product] = []
        self.additions: list[Callable[[], None]] = []
        self.unfenced: list[Array] = []


class Machine:
    """What one program has: its partitions, what they wrote last, and copies under way."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._partitions: list[_Partition] = []
        self._copies: list[Callable[[], None]] = []
        self._main = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._now: _Partition | None = None

    @property
    def now(self) -> _Partition:
        """The partition that runs."""
        assert self._now is not None, "outside of warp_specialize"
        return self._now

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Runs all partitions to their ends.

        Raises:
            DeadlockError: They wait for each other.
            RaceError: What they do is not ordered.
        """
        self._partitions = [_Partition(i, run) for i, run in enumerate(functions)]
        threads = [
            threading.Thread(target=self._thread, args=(x,), daemon=True) for x in self._partitions
        ]
        for thread in threads:
            thread.start()
        order = list(self._partitions)
        while self._error is None and not all(x.is_over for x in self._partitions):
            if self._random.random() < _CHANGES:
                self._random.shuffle(order)
            ready = [x for x in order if not x.is_over and x.waits_for()]
            if self._copies and (not ready or self._random.random() < _COPIES):
                self._copies.pop(self._random.randrange(len(self._copies)))()
            elif ready:
                self._now = ready[0]
                self._now.turn.release()
                self._main.acquire()
            else:
                waiting = [x for x in self._partitions if not x.is_over]
                waits = "; ".join(f"{x.name} waits for {x.reason}" for x in waiting)
                self._error = DeadlockError(waits)
        for partition in self._partitions:
            partition.turn.release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        if self._copies:
            raise RaceError(f"{len(self._copies)} copies into shared memory outlive the program")

    def _thread(self, partition: _Partition) -> None:
        partition.turn.acquire()
        try:
            # NumPy's is of the thread.
            with np.errstate(all="ignore"):
                if self._error is None:
                    partition.run()
            if self._error is None and partition.additions:
                raise RaceError(f"{partition.name} ends before what it adds to memory is read")
        except BaseException as error:
            self._error = self._error or error
        partition.is_over = True
        self._main.release()

    def pause(self, until: Callable[[], bool] = lambda: True, reason: str = "a turn") -> None:
        """Lets others run, at least until something holds."""
        partition = self.now
        partition.waits_for, partition.reason = until, reason
        self._main.release()
        partition.turn.acquire()
        if self._error is not None:
            raise self._error

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

        self._copies.append(arrive)
        self.pause()

    def wrote(self, target: Array) -> None:
        """By ordinary stores: seen by what is asynchronous behind a fence alone."""
        self.now.unfenced.append(target)

    def fence(self) -> None:
        """What was stored before is seen by what is asynchronous."""
        if self._now is not None:
            self._now.unfenced.clear()

    def check_fenced(self, source: Array) -> None:
        """Before something asynchronous reads it.

        Raises:
            RaceError: Somebody has stored there, and no fence since.
        """
        for partition in self._partitions:
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

    def add(self, source: Array, add: Callable[[Array], None]) -> None:
        """Adds a tile of shared memory to memory, read when that is waited for."""
        self.check_fenced(source)
        seen = source.copy()

        def finish() -> None:
            if source.tobytes() != seen.tobytes():
                raise RaceError("a tile is written before it is added to memory")
            add(seen)

        self.now.additions.append(finish)

    def finish_additions(self, left: int) -> None:
        """All but the last ones have been read."""
        additions = self.now.additions
        while len(additions) > left:
            additions.pop(0)()


def poison(target: Array) -> None:
    """NaN, of any type, in place of what is there."""
    target.view(np.uint8)[...] = 0xFF
