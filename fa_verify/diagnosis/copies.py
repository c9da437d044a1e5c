"""Copies of the package ``fa_kernels``, each imported under a name of its own."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

__all__ = ["PACKAGE", "load", "sources_of"]

PACKAGE = "fa_kernels"
_ROOT = Path(__file__).parents[2]


def sources_of(*folders: str) -> dict[str, str]:
    """Every Python file below folders of the repository: path from its root to text."""
    return {
        path.relative_to(_ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((_ROOT / folder).rglob("*.py"))
    }


def load(sources: Mapping[str, str], folder: Path) -> ModuleType:
    """Imports a copy of ``fa_kernels`` from other sources, as a package of the folder's name.

    Every module and file of the copy has its own name, so that Triton compiles its kernels as
    kernels of their own, and nothing of the original takes part: lines stay where they were.

    Args:
        sources: Path from the root of the repository to text, as of ``sources_of(PACKAGE)``.
        folder: Is made, and holds the files afterwards; its name is the copy's: an identifier that
            no module has.

    Raises:
        ValueError: The name is none, or is taken.
    """
    name = folder.name
    if not name.isidentifier() or name in sys.modules:
        raise ValueError(f"folder is {folder}; needs the name of a module that there is not yet")
    for path, text in sources.items():
        file = folder / Path(path).relative_to(PACKAGE)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(re.sub(rf"\b{PACKAGE}\b", name, text), encoding="utf-8")
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder.parent))
