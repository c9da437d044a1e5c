"""Fixture of all tests of calls."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Forget the frames that torch.compile compiled, or gave up, in tests before this one."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
