"""The frames by which an exception comes from the suite, from a library, or from a kernel."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import fa_verify
from fa_verify.pytest_plugin.causes import plugin

SUITE = Path(fa_verify.__file__).parent


@pytest.mark.parametrize(
    ("files", "of_the_suite"),
    [
        ((SUITE / "session.py", SUITE / "simulator" / "interpreter" / "repair.py"), True),
        ((SUITE / "conformance" / "test_claims.py", Path(torch.__file__)), True),
        ((SUITE / "session.py", SUITE / "adapters" / "sdpa.py", Path(torch.__file__)), False),
        ((SUITE / "session.py", Path("/home/me/kernel.py")), False),
    ],
    ids=["simulator", "library", "adapter", "kernel"],
)
def test_an_error_is_of_the_suite_without_a_frame_of_a_kernel(monkeypatch, files, of_the_suite):
    """The blame follows from paths, so a folder that moves would be blamed in silence."""
    assert all(x.exists() for x in files if x.is_relative_to(SUITE))
    frames = [traceback.FrameSummary(str(x), 1, "call", lookup_line=False) for x in files]
    monkeypatch.setattr(traceback, "extract_tb", lambda _: frames)
    assert plugin._is_of_the_suite(ValueError("no")) is of_the_suite
