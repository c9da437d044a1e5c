"""Every recorded fault that the kernels can have is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.outcomes import read

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="the interpreter runs mutants where there is no GPU; --mutation, what only a GPU shows",
)
def test_every_fault_on_record_is_killed(tmp_path):
    """Runs in a process of its own: it forks for each fault, and a fork copies only one thread."""
    command = [sys.executable, "-m", "tests.mutation", "faults", "--jobs", "1", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {x.name: x for x in read(tmp_path / "outcomes.jsonl")}
    ends = {fault.name: outcomes[fault.name].end for fault in FAULTS if not fault.equivalent}
    assert set(ends.values()) == {"killed"}, ends
