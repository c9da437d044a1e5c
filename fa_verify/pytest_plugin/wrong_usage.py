"""A pytest plugin that gives wrong usage the status of the command.

pytest's own status would say that nothing was verified.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from fa_verify.conformance_process import Status
from fa_verify.reporting.statuses import gives_status

__all__ = ["pytest_cmdline_main"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Give wrong usage its status: pytest's own would say that nothing was verified."""
    try:
        return (yield)
    except pytest.UsageError as error:
        if not gives_status(config):
            raise
        # As pytest prints it.
        print(*(f"ERROR: {said}\n" for said in error.args), file=sys.stderr)
        return int(Status.USAGE)
