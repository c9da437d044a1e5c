"""The causes of a run in a file, which its processes share."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fa_verify.properties.running.atomic_write import write_atomically
from fa_verify.properties.search.causes import Known, RootCause

__all__ = ["Shared"]


class Shared(Known):
    """A store in a file of a folder. Every process of the run reads and writes it.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "causes.json"
        self._lock = folder / "lock"

    def known(self) -> list[RootCause]:
        """Return the causes found so far by all processes."""
        self._read()
        return super().known()

    def add(self, cause: RootCause) -> int:
        """Store a cause, or join it with one that covers it; return the number."""
        with self._alone():
            number = super().add(cause)
            self._write()
        return number

    def replace(self, cause: RootCause) -> None:
        """Store a cause again, with a smaller problem, more outputs or fewer features."""
        with self._alone():
            super().replace(cause)
            self._write()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the folder. ``add`` calls ``replace`` under the same lock."""
        if getattr(self, "_held", False):
            yield
            return
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._held = True
            self._read()
            yield
        finally:
            self._held = False
            os.close(handle)

    def _read(self) -> None:
        if self._file.exists():
            record = json.loads(self._file.read_text(encoding="utf-8"))
            self.causes = {x["number"]: RootCause.of(x) for x in record["causes"]}
            self.joined = {int(key): value for key, value in record["joined"].items()}

    def _write(self) -> None:
        causes = [cause.record() for cause in self.causes.values()]
        write_atomically(self._file, json.dumps({"causes": causes, "joined": self.joined}))
