"""Mechanical mutants that no input of the contract can show, each with the reason."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["EQUIVALENT"]


def _read(path: Path) -> dict[str, str]:
    """Reasons by the name of the mutant."""
    groups = tomllib.loads(path.read_text(encoding="utf-8"))["equivalent"]
    return {name: group["because"] for group in groups for name in group["mutants"]}


EQUIVALENT = _read(Path(__file__).with_suffix(".toml"))
