"""A GPU kills every mutant that needs one.

``pytest tests/mutation/test_hardware.py --mutation`` runs the mutants.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.mutation.catalogue.hardware import HARDWARE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [x.mutant.name for x in HARDWARE])
def test_a_mutant_is_noticed_on_hardware(pytestconfig, name):
    """Runs in a process of its own, because a mutant can leave its GPU unusable."""
    if not pytestconfig.getoption("--mutation"):
        pytest.skip("--mutation runs it, on a GPU")
    assert torch.cuda.is_available(), "--mutation needs a GPU; make mutation runs without one"
    command = [sys.executable, "-m", "tests.mutation.catalogue.hardware", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    survived = done.returncode == 0 and '"kills": []' in done.stdout
    assert not survived, f"{name}\n{done.stdout}{done.stderr}"
    # Only a lost GPU may end the process without a verdict.
    assert done.returncode == 0 or "CUDA error" in done.stderr, done.stderr
