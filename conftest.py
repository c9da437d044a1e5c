"""A checkout's runs load all of the plugin, and its options have short forms."""

from __future__ import annotations

import pytest

from fa_verify.pytest_plugin.options import add_short_forms

pytest_plugins = ["fa_verify.pytest_plugin.running"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kernel`` for ``--fa-kernel``, and so on."""
    add_short_forms(parser.getgroup("attention verification, short forms"))
