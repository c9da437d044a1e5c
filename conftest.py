"""A checkout's runs load all of the plugin, and its options have short forms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fa_verify.pytest_plugin.options import add_short_forms

pytest_plugins = ["fa_verify.pytest_plugin.running"]

# Where byte code is not written beside sources, each of the processes that tests start would
# compile the suite again, which takes as long as its imports.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / "build" / "bytecode")


# The tests of this repository that take long, beside those of the suite. The faults are one test of
# 250 s in the interpreter. The others start processes.
FIRST = ("mutation/test_faults.py",)
OTHERS = (
    "unit/fa_verify/",
    "unit/benchmarks/findings/",
    "unit/repository/test_docs.py",
    "unit/repository/test_installation.py",
    "unit/fa_kernels/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kernel`` for ``--fa-kernel``, and so on, and ``--mutation``."""
    add_short_forms(parser.getgroup("attention verification, short forms"))
    parser.addoption(
        "--mutation", action="store_true", help="run the mutants that only a GPU can detect"
    )


def pytest_configure() -> None:
    """Deal the tests of this repository that take long before others."""
    # Imported after the plugin, which sets environment variables before torch is imported.
    from fa_verify.pytest_plugin.turns import LONGEST

    LONGEST[:] = [*FIRST, *LONGEST, *OTHERS]
