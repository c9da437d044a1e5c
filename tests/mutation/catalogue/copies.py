"""Import edited copies of the package ``fa_kernels`` under new names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

__all__ = ["PACKAGE", "load", "sources_of"]

PACKAGE = "fa_kernels"
_ROOT = Path(__file__).parents[3]


def sources_of(*folders: str) -> dict[str, str]:
    """Return the text of every Python file below folders, by path from the repository's root."""
    return {
        path.relative_to(_ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((_ROOT / folder).rglob("*.py"))
    }


def load(sources: Mapping[str, str], folder: Path) -> ModuleType:
    """Import a copy of ``fa_kernels`` from other sources, as a package with the folder's name.

    Every module and file of the copy has a new name, so that Triton compiles its kernels
    separately and the copy imports nothing from the original. Line numbers do not change.

    Args:
        sources: Path from the root of the repository to text, as ``sources_of(PACKAGE)`` returns
            it.
        folder: Folder to create and write the files to. Its name is the name of the package: an
            identifier that no imported module has.

    Raises:
        ValueError: The folder's name is not an identifier, or a module with the name exists.
    """
    name = folder.name
    if not name.isidentifier() or name in sys.modules:
        raise ValueError(f"folder is {folder}; needs a name that is an identifier and no module's")
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
