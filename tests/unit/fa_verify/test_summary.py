"""The summary counts the kernels that a run compiles, and how often; the controller prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.pytest_plugin.environment import HAS_TRITON
from fa_verify.pytest_plugin.summary import Summary

ROOT = Path(__file__).parents[3]
# A compilation needs no GPU, but a process without the interpreter.
COMPILING = """
import os, sys
import triton
import triton.language as tl
from fa_verify.pytest_plugin.summary import Summary
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def zeros(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, n), 0.0)

summary = Summary()
for folder, n in (("a", 16), ("a", 32), ("a", 16), ("b", 16)):
    os.environ["TRITON_CACHE_DIR"] = os.path.join(sys.argv[1], folder)
    source = ASTSource(zeros, {"x": "*fp32", "n": "constexpr"}, {"n": n})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(len(summary.compiled), summary.compiled.total(), summary.compiling > 0)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_kernel_that_two_caches_lack_counts_once_and_its_compilations_twice(tmp_path):
    script = tmp_path / "compiling.py"
    script.write_text(COMPILING)
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "3", "True"], done.stderr


@pytest.mark.parametrize("worker", [{}, {"workerinput": {}}], ids=["controller", "worker"])
def test_the_controller_alone_prints_the_summary(worker, pytestconfig):
    summary, terminal = Summary(), mock.Mock()
    summary.tally.refused(Problem(), "no float64")
    config = SimpleNamespace(
        stash=pytestconfig.stash, rootpath=Path("/"), option=SimpleNamespace(collectonly=False),
        **worker,
    )  # fmt: skip
    with (
        mock.patch("fa_verify.pytest_plugin.summary.is_ours", return_value=True),
        mock.patch("fa_verify.pytest_plugin.summary.mask_of", return_value=None),
        mock.patch("fa_verify.pytest_plugin.summary.is_whole", return_value=False),
    ):
        summary.pytest_terminal_summary(terminal, config)
    assert terminal.section.called == (not worker)
