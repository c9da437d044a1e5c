"""A fault at one declared value is found, and a value that the kernel refuses is named."""

from __future__ import annotations

from fa_verify.properties.guarantees.claims import accuracy
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner
from fa_verify.quick import entries_for
from tests.unit.fa_verify.test_command import run

KERNELS = """
import torch
from fa_verify import attention_kernel

declares = attention_kernel(
    head_dims=(64, 112), dtypes=("fp32",), masks=(), gqa=False, dv_ne_d=False, backward=False,
    p_dtype="fp32", p_normalised=True, devices=("cpu",),
)


@declares
def narrow(q, k, v, *, mask, sm_scale):
    used = min(q.shape[3], 96)
    return torch.softmax(q[..., :used] @ k[..., :used].mT * sm_scale, -1) @ v


@declares
def refuses(q, k, v, *, mask, sm_scale):
    if q.shape[3] > 96:
        raise NotImplementedError("takes 96 columns at most")
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v
"""


def test_a_kernel_that_loses_columns_of_a_declared_head_dim_fails(tmp_path):
    (tmp_path / "sizes.py").write_text(KERNELS)
    done = run(tmp_path, "check", "sizes.py:narrow", "--", "-n0", "-k", "declared")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "smallest: M=1 N=2 D=112 Dv=112 fp32" in done.stdout
    subject = load(f"{tmp_path / 'sizes.py'}:narrow")
    runner = Runner(subject, Tally())
    problems = [entry.problem for entry in entries_for(subject, "cpu")]
    wrong = next(x for x in problems if x.D == 112)
    assert runner.findings(wrong, accuracy)
    assert not runner.findings(next(x for x in problems if x.D == 64), accuracy)


def test_a_declared_value_that_the_kernel_refuses_stands_in_the_first_line(tmp_path):
    (tmp_path / "sizes.py").write_text(KERNELS)
    done = run(tmp_path, "check", "sizes.py:refuses", "--quick", "--", "-n0")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("sizes.py:refuses  "))
    assert line.endswith("; not drawn: head_dims 112")
