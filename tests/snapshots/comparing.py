"""Snapshots as files, and what differs between two of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

__all__ = ["difference", "read", "write"]

_MOST_LINES = 20
# Says which kernel an entry is about, whatever it is called.
_KERNEL = "kernel"


def write(snapshot: Mapping[str, Any], path: Path) -> None:
    """A line for each entry, in the order of their names, so that files can be compared too."""
    lines = (f"{json.dumps(name)}: {json.dumps(snapshot[name])}" for name in sorted(snapshot))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What ``write`` has written."""
    return json.loads(path.read_text(encoding="utf-8"))


def difference(
    then: Mapping[str, Any], now: Mapping[str, Any], parts: Collection[str] | None = None
) -> list[str]:
    """Lines that say what is missing, new and different; none where the two are the same.

    Args:
        then: What was recorded.
        now: What there is.
        parts: Those of an entry that count, if not all do; the name of its kernel never does.
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
    """What differs: parts of an entry, or the whole where it has none; empty if nothing does."""
    if then == now:
        return ""
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        return f"{json.dumps(then)} -> {json.dumps(now)}"
    names = sorted({*then, *now} - {_KERNEL})
    said = [x for x in names if then.get(x) != now.get(x) and (parts is None or x in parts)]
    of = f" of {now[_KERNEL]}" if _KERNEL in now else ""
    return f"{', '.join(said)}{of}" if said else ""
