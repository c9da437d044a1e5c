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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kernel`` for ``--fa-kernel``, and so on."""
    add_short_forms(parser.getgroup("attention verification, short forms"))
