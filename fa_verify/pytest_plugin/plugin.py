"""The module that pytest loads where fa-verify is installed, by its entry point ``pytest11``.

It adds the options. If one is given, ``running`` does the work; otherwise nothing is changed and
nothing is imported, so that the other tests of an environment run as without this plugin.
"""

from __future__ import annotations

import importlib.util

import pytest

from fa_verify.pytest_plugin import options

__all__ = ["pytest_addoption", "pytest_configure", "pytest_load_initial_conftests"]

_NEEDED = ("hypothesis", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which start with ``--fa-``."""
    options.add_options(parser.getgroup("attention verification"))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load ``running`` before any conftest.py can import torch or Triton."""
    _load(early_config, early_config.known_args_namespace)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load ``running`` in a worker that loaded this module too late for its conftest files.

    Raises:
        pytest.UsageError: The conformance tests are selected without a kernel.
    """
    _load(config, config.option)
    if next(options.given(config.option), None) is None and any(
        f"{argument}.".startswith("fa_verify.conformance.") for argument in config.args
    ):
        raise pytest.UsageError("fa_verify.conformance needs --fa-kernel=path/to/file.py:name")


def _load(config: pytest.Config, namespace: object) -> None:
    asked = next(options.given(namespace), None)
    if asked is None:
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"{asked} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    config.pluginmanager.import_plugin("fa_verify.pytest_plugin.running")
