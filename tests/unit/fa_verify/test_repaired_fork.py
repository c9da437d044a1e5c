"""verify() repairs Triton's interpreter in a fork, and leaves that of its own process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa_verify import verification, verify
from fa_verify.oracles.problem import Problem
from fa_verify.repaired_fork import in_repaired_fork
from tests.unit.properties.kernels.broken_subjects import Eager

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]

# A script as a user writes it: no guard of __main__, no repair, and a kernel in a closure.
SCRIPT = """
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl

from fa_verify import verify
from fa_verify.oracles.problem import Problem
from fa_verify.simulator.interpreter.repair import describe


@triton.jit
def kernel(q, k, v, o, N, Dv, scale, D: tl.constexpr, BLOCK: tl.constexpr, TOO_MANY: tl.constexpr):
    d, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    row = tl.program_id(0)
    wide = d[None, :] < D
    query = tl.load(q + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    keys = tl.load(k + n[:, None] * D + d[None, :], mask=(n[:, None] < N) & wide, other=0.0)
    narrow = (n[:, None] < N) & (d[None, :] < Dv)
    values = tl.load(v + n[:, None] * Dv + d[None, :], mask=narrow, other=0.0)
    scores = tl.where(n < N, tl.sum(query[None, :] * keys.to(tl.float32), 1) * scale, -float("inf"))
    p = tl.exp(scores - tl.max(scores, 0))
    out = tl.sum(p[:, None] * values.to(tl.float32), 0) / tl.sum(p, 0)
    tl.store(o + row * Dv + d, out.to(o.dtype.element_ty), mask=(d < Dv) | TOO_MANY)


def subject(too_many):
    def attention(q, k, v, *, mask, sm_scale):
        M, D, N, Dv = q.shape[2], q.shape[3], k.shape[2], v.shape[3]
        o = torch.empty(1, 1, M, Dv, dtype=q.dtype)
        tensors = (x.contiguous() for x in (q, k, v))
        kernel[(M,)](*tensors, o, N, Dv, sm_scale, D, 512 if too_many else 64, too_many)
        return o

    attention.masks, attention.gqa, attention.backward = (), False, False
    attention.dtypes = ("bf16",)
    return attention


torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # starts the threads of OpenMP
problems = [Problem(M=3, N=n, D=16, Dv=16, dtype="bf16") for n in (1, 5, 33)]
print(verify(subject(False), problems=problems, guarantees=("G1", "G2")))
print(verify(subject(True), problems=problems[:1], guarantees=("G1",)))
print(describe())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no interpreter where there is a GPU")
def test_a_script_without_a_repair_is_judged_by_the_repaired_interpreter(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    right, _, wrong = done.stdout.partition("exception:")
    assert "3 distinct problems judged" in right
    assert "replay" not in right
    assert "OutOfBoundsError" in wrong
    # The interpreter of the script's own process is as it was.
    assert done.stdout.endswith("interpreter not repaired\n")


def test_a_report_survives_the_way_from_a_fork():
    """Its findings, problems and numbers are those of a run in this process."""
    problems = [Problem(M=5, N=7, dtype="fp64"), Problem(B=2, dtype="fp64")]
    report = verify(Eager("out scaled"), problems=problems)
    assert in_repaired_fork(lambda: report) == report


def test_a_fork_changes_nothing_here():
    changed = []
    assert in_repaired_fork(lambda: changed.append(1)) is None
    assert changed == []


def test_no_fork_shares_a_gpu(monkeypatch):
    monkeypatch.setattr(verification, "is_needed", lambda: True)
    says = r"a fork that repairs it cannot use the GPU; call .*repair\(\) before the kernel"
    with pytest.raises(RuntimeError, match=says):
        verify(Eager(), problems=1, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=says):
        verify(Eager(), problems=1)


def raises():
    raise LookupError("as here")


@pytest.fixture(autouse=True)
def no_repair(monkeypatch):
    """Forks of this process do not repair: it runs the interpreter or a GPU."""
    monkeypatch.setattr("fa_verify.repaired_fork.repair", lambda: None)


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        (raises, LookupError, "as here"),
        (lambda: os._exit(3), RuntimeError, r"interpreter died; to see where, call .*repair\(\)"),
        (lambda: lambda: 1, RuntimeError, r"cannot return <function .*; call .*repair\(\)"),
    ],
    ids=["raised", "died", "not pickled"],
)
def test_the_end_of_a_fork_is_told(work, error, says):
    with pytest.raises(error, match=says):
        in_repaired_fork(work)
