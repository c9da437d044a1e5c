"""Which causes of failure a run has found, as all its processes know it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fa_verify.properties.execution.atomic_write import write_atomically
from fa_verify.properties.search.corpus import Cause

__all__ = ["Causes"]


class Causes:
    """Files in a folder of the run: a cause belongs to the search that claims it first.

    The others pass it over, so that one fault does not keep all workers shrinking.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, cause: Cause) -> bool:
        """Whether nobody had found the cause before."""
        try:
            os.close(os.open(self._file(cause, "claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def claimed(self, cause: Cause) -> bool:
        """Whether somebody has."""
        return self._file(cause, "claimed").exists()

    def note(self, cause: Cause, path: Path) -> None:
        """Says which regression file holds a problem of the cause, or will in a moment."""
        write_atomically(self._file(cause, "entry"), str(path))

    def files(self) -> list[Path]:
        """The regression files of the run's corpus entries."""
        noted = {Path(note.read_text()) for note in self.folder.glob("*.entry")}
        return sorted(path for path in noted if path.exists())

    def _file(self, cause: Cause, suffix: str) -> Path:
        digest = hashlib.blake2b(str(cause).encode(), digest_size=8).hexdigest()
        return self.folder / f"{digest}.{suffix}"
