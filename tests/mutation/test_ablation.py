"""Each statistical and each closed-form check finds a fault that the bound misses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.properties.guarantees.claims import checks_of
from tests.mutation.ablation import ABLATION

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def test_the_ablation_covers_all_statistical_and_closed_form_checks():
    checks = {name.split()[0] for name in ABLATION}
    assert checks == {"backward", "limit", *checks_of("statistics", "closed forms")}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter runs mutants"
)
def test_each_check_finds_a_fault_that_the_bound_misses():
    """Runs in a process of its own: it forks for each fault, and a fork copies only one thread."""
    command = [sys.executable, "-m", "tests.mutation.ablation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
