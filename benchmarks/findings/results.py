"""Read, validate and update the files results/DEVICE/findings.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.findings.environment import slug
from fa_verify.adapters.registry import NAMED
from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["FILE", "OTHERS", "VERSION", "read", "read_all", "write"]

VERSION = 1
FILE = "findings.json"
# Prose beside the folders of devices.
OTHERS = "other-repositories.md"

# Schema: a type; a list with the schema of its elements; a dict with the schema of each key, where
# the key "" stands for any key.
_FINDING = {"message": str, "problem": str, "test": str}
_GUARANTEE = {
    "passed": int, "failed": int, "undecided": int, "skipped": {"": int}, "findings": [_FINDING],
}  # fmt: skip
_SUBJECT = {
    "about": str, "declared": str, "declares": dict, "never_promised": {"": str}, "profile": str,
    "versions": {"": str}, "tests": int, "judged": int, "ended": str, "said": str,
    "refusals": {"": int}, "worst": {"": float}, "guarantees": {"": _GUARANTEE},
}  # fmt: skip
_FORM = {"version": int, "device": str, "missing": {"": str}, "subjects": {"": _SUBJECT}}


def read(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Raises:
        ValueError: The file cannot be read, does not match the schema, or has another version. The
            message names the file and the offending entry.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} has version {version!r}; this suite reads version {VERSION}")
    wrong = _wrong(found, _FORM, "")
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}")
    return dict(found)


def read_all(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read all files of results below a folder.

    Returns:
        The contents of the files, sorted by path, and a message for each file that cannot be read.
    """
    good, bad = [], []
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            good.append(read(path))
        except ValueError as error:
            bad.append(str(error).replace(f"{folder.parent}{os.sep}", ""))
    return good, bad


def write(
    folder: Path, device: str, subjects: Mapping[str, Any], missing: Mapping[str, str]
) -> Path:
    """Add subjects to the file of a device, replacing earlier results of the same subjects.

    Args:
        folder: Folder of the results.
        device: Name of the device.
        subjects: Name of a subject to its results.
        missing: Name of a subject that cannot run on this device to the reason.

    Returns:
        The path of the file.

    Raises:
        ValueError: The existing file cannot be read. It is not overwritten.
    """
    path = folder / slug(device) / FILE
    before = read(path) if path.exists() else {"subjects": {}}
    if not (subjects or missing):
        return path
    both = {**before["subjects"], **subjects}
    order = [*NAMED, *both]
    content = {
        "version": VERSION,
        "device": device,
        "missing": {name: why for name, why in missing.items() if name not in both},
        "subjects": {name: both[name] for name in sorted(both, key=order.index)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{json.dumps(content, indent=1)}\n")
    return path


def _wrong(found: Any, form: Any, where: str) -> str:
    """Describe the first mismatch between a value and a schema; empty if they match."""
    if isinstance(form, type):
        right = isinstance(found, form) and not (form is int and isinstance(found, bool))
        return "" if right else f"{where} is {found!r:.60}; needs {form.__name__}"
    if not isinstance(found, type(form)):
        return f"{where or 'it'} is {found!r:.60}; needs {type(form).__name__}"
    if isinstance(form, list):
        inner = [(value, form[0], f"{where}[{i}]") for i, value in enumerate(found)]
    elif "" in form:
        inner = [(value, form[""], f"{where}.{key}") for key, value in found.items()]
    else:
        missing = [key for key in form if key not in found]
        if missing:
            return f"{where or 'it'} has no {missing[0]!r}"
        inner = [(found[key], value, f"{where}.{key}") for key, value in form.items()]
    return next((x for x in (_wrong(*one) for one in inner) if x), "")
