"""A GPU kills every mutant that needs one: ``pytest --fa-mutation`` on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.mutation.mutants.hardware import HARDWARE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [x.mutant.name for x in HARDWARE])
def test_a_mutant_is_noticed_on_hardware(pytestconfig, name):
    """Runs in a process of its own, because a mutant can leave its GPU unusable."""
    if not pytestconfig.getoption("--fa-mutation"):
        pytest.skip("--fa-mutation runs it, on a GPU")
    command = [sys.executable, "-m", "tests.mutation.mutants.hardware", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    survived = done.returncode == 0 and '"kills": []' in done.stdout
    assert not survived, f"{name}\n{done.stdout}{done.stderr}"
    # Only a lost GPU may end the process without a verdict.
    assert done.returncode == 0 or "CUDA error" in done.stderr, done.stderr
