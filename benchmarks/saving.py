"""Writes what a benchmark measured to ``results`` or ``build``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.findings.environment import device_name, slug
from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["saved"]


def saved(root: Path, name: str, record: Mapping[str, object], *, device: str, keep: bool) -> Path:
    """Writes a record as JSON, and returns its path below the root.

    Args:
        root: The folder that holds ``results`` and ``build``.
        name: Name of the file.
        record: Plain values.
        device: "cuda" or "cpu".
        keep: Whether the file goes to the folder of this device in ``results``, not to ``build``.
    """
    place = slug(device_name()) if device == "cuda" else "cpu"
    path = Path("results", place, name) if keep else Path("build", name)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(root / path, json.dumps(record, indent=1) + "\n")
    return path
