"""Mechanical mutants that no input of the contract can show, or none without a GPU, and why."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["EQUIVALENT"]


def _read(path: Path) -> dict[str, str]:
    """Reasons by the name of the mutant."""
    groups = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: f"on hardware alone: {group['because']}" if kind == "hardware" else group["because"]
        for kind in ("equivalent", "hardware")
        for group in groups[kind]
        for name in group["mutants"]
    }


EQUIVALENT = _read(Path(__file__).with_suffix(".toml"))
