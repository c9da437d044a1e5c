"""Fixtures with the kernels and with edited copies of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest

from tests.mutation.catalogue.copies import PACKAGE, load, sources_of
from tests.mutation.catalogue.mutant import Edit, Mutant, mutated

__all__ = ["edited", "kernels"]


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The package of the kernels; skips the test if Triton is not installed."""
    return pytest.importorskip("fa_kernels")


@pytest.fixture(scope="session")
def edited(kernels, tmp_path_factory) -> Callable[..., ModuleType]:
    """Loads a copy of the package with edits: (name, *edits) -> package, once for each name."""
    folder = tmp_path_factory.mktemp("copies")
    sources = sources_of(PACKAGE)

    @cache
    def load_edited(name: str, *edits: Edit) -> ModuleType:
        return load(mutated(sources, Mutant(name, edits)), folder / name)

    return load_edited
