"""The command line: --replay runs one problem, and refuses what is not a problem."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oracles.problem import Problem

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, without this run's workers."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{M: 1}", "problem is not JSON"),
        ('{"version":99,"M":1}', "problem has version 99; this suite reads version 1"),
        ('{"version":1,"Q":1}', "problem has unknown fields ['Q']"),
        ('{"version":1,"mask":{"type":"os.system"}}', "mask type 'os.system' is not replayable"),
    ],
)
def test_what_is_not_a_problem_is_refused(text, says):
    done = run(f"--replay={text}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--replay: {says}" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_problem_is_replayed_alone(device):
    problem = Problem(M=3, N=5, dtype="fp16", config="16x16", seed=4, device=device)
    done = run(f"--replay={problem.to_json()}")
    assert done.returncode == 0, done.stdout
    assert f"replaying {problem.to_json()}" in done.stdout
    assert "1 distinct problems judged on all outputs" in done.stdout
    assert "1 passed" in done.stdout
