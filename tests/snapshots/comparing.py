"""Reads, writes and compares snapshots."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

__all__ = ["difference", "read", "write"]

_MOST_LINES = 20
# The field with the kernel's name, which may change.
_KERNEL = "kernel"


def write(snapshot: Mapping[str, Any], path: Path) -> None:
    """Writes a line for each entry, sorted by name, so that ``diff`` can compare the files."""
    lines = (f"{json.dumps(name)}: {json.dumps(snapshot[name])}" for name in sorted(snapshot))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The snapshot in a file that ``write`` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def difference(
    then: Mapping[str, Any], now: Mapping[str, Any], parts: Collection[str] | None = None
) -> list[str]:
    """Lines with the missing, new and different entries; none if the snapshots are equal.

    Args:
        then: The recorded snapshot.
        now: The snapshot of the current sources.
        parts: Fields of an entry to compare; None for all but the kernel's name.
    """
    different = {name: _said(then[name], now[name], parts) for name in sorted({*then} & {*now})}
    kinds = {
        "missing": sorted({*then} - {*now}),
        "new": sorted({*now} - {*then}),
        "different": [f"{name}: {said}" for name, said in different.items() if said],
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            lines.append(f"{len(names)} {kind}:")
            lines += [f"  {name}" for name in names[:_MOST_LINES]]
            if len(names) > _MOST_LINES:
                lines.append(f"  and {len(names) - _MOST_LINES} more")
    return lines


def _said(then: Any, now: Any, parts: Collection[str] | None) -> str:
    """The fields of an entry that differ, or the values if it has no fields; empty if equal."""
    if then == now:
        return ""
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        return f"{json.dumps(then)} -> {json.dumps(now)}"
    names = sorted({*then, *now} - {_KERNEL})
    said = [x for x in names if then.get(x) != now.get(x) and (parts is None or x in parts)]
    of = f" of {now[_KERNEL]}" if _KERNEL in now else ""
    return f"{', '.join(said)}{of}" if said else ""
