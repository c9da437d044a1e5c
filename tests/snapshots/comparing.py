"""Snapshots as files, and what differs between two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["difference", "read", "write"]

_MOST_LINES = 20


def write(snapshot: Mapping[str, Any], path: Path) -> None:
    """A line for each entry, in the order of their names, so that files can be compared too."""
    lines = (f"{json.dumps(name)}: {json.dumps(snapshot[name])}" for name in sorted(snapshot))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What ``write`` has written."""
    return json.loads(path.read_text(encoding="utf-8"))


def difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines that say what is missing, new and different; none where the two are the same."""
    kinds = {
        "missing": [name for name in sorted(then) if name not in now],
        "new": [name for name in sorted(now) if name not in then],
        "different": [
            f"{name}: {_said(then[name], now[name])}"
            for name in sorted(then)
            if name in now and then[name] != now[name]
        ],
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            lines.append(f"{len(names)} {kind}:")
            lines += [f"  {name}" for name in names[:_MOST_LINES]]
            if len(names) > _MOST_LINES:
                lines.append(f"  and {len(names) - _MOST_LINES} more")
    return lines


def _said(then: Any, now: Any) -> str:
    """Which parts of an entry differ, or both where it has none."""
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        return f"{json.dumps(then)} -> {json.dumps(now)}"
    return ", ".join(x for x in sorted({*then, *now}) if then.get(x) != now.get(x))
