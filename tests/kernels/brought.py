"""Import kernels of other repositories, which ``make kernels`` brings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["FOLDER", "file", "importable", "module", "stand_in"]

FOLDER = Path(__file__).parents[2] / "build" / "kernels"


def file(repository: str, path: str) -> Path:
    """Return a file of a repository.

    Raises:
        ModuleNotFoundError: The file was not brought.
    """
    found = FOLDER / repository / path
    if not found.is_file():
        raise ModuleNotFoundError(f"{repository} has no {path} in {FOLDER}: make kernels brings it")
    return found


def module(repository: str, path: str) -> ModuleType:
    """Run a file of a repository as a module; its name need not be one of Python."""
    found = file(repository, path)
    spec = importlib.util.spec_from_file_location(f"brought_{found.stem}", found)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def importable(repository: str, path: str, root: str = "") -> None:
    """Let packages of a repository be imported, once one of their files was brought."""
    file(repository, path)
    folder = str(FOLDER / repository / root)
    if folder not in sys.path:
        sys.path.append(folder)


def stand_in(name: str, **names: Any) -> None:
    """Provide a module with some names in place of one that a kernel needs little of."""
    made = ModuleType(name)
    vars(made).update(names)
    sys.modules.setdefault(name, made)
