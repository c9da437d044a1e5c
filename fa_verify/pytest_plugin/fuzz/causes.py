"""The causes of failure found in a run, shared by its processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fa_verify.properties.running.atomic_write import write_atomically
from fa_verify.properties.search.corpus import Cause

__all__ = ["Causes"]


class Causes:
    """Causes of failure, stored as files in a folder of the run.

    A cause belongs to the search that claims it first. The other searches ignore failures with
    this cause, so that one fault does not occupy all workers with shrinking.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, cause: Cause) -> bool:
        """Claim a cause. Returns False if another search has claimed it."""
        try:
            os.close(os.open(self._file(cause, "claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def claimed(self, cause: Cause) -> bool:
        """Return whether any search has claimed a cause."""
        return self._file(cause, "claimed").exists()

    def note(self, cause: Cause, path: Path) -> None:
        """Record the path of the cause's regression file, which may not be written yet."""
        write_atomically(self._file(cause, "entry"), str(path))

    def files(self) -> list[Path]:
        """Return the regression files that the run has written."""
        noted = {Path(note.read_text()) for note in self.folder.glob("*.entry")}
        return sorted(path for path in noted if path.exists())

    def _file(self, cause: Cause, suffix: str) -> Path:
        digest = hashlib.blake2b(str(cause).encode(), digest_size=8).hexdigest()
        return self.folder / f"{digest}.{suffix}"
