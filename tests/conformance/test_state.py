"""G13: the 100th call equals the first, and a call after others equals one in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.conformance.fresh_process import digests
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks import guarantees
from fa_verify.properties.checks.invariance import neighbours
from fa_verify.properties.comparison.agreement import agree
from fa_verify.properties.execution.trial import run_subject
from fa_verify.session import OURS

ROOT = Path(__file__).parents[2]
CALLS = 100


def test_the_hundredth_call_gives_what_the_first_gave(check_one, subject, device):
    problem = Problem(
        N=2, dtype=subject.dtypes[0], device=device, config=next(iter(subject.configs))
    )

    def hundred_calls(trial):
        for _ in range(CALLS - 1):
            again = run_subject(subject, problem, trial.inputs)
        return agree(trial, again, "G13 state", f"differs at call {CALLS}")

    check_one(problem, hundred_calls)


@pytest.mark.shards(0, 5)
def test_a_call_after_others_gives_what_it_gives_in_a_fresh_process(
    check_one, subject, device, shard, pytestconfig
):
    D = shard.head_dims[0]
    size = 2 * subject.seqlen_multiple if subject.seqlen_multiple > 1 else 21
    problem = Problem(
        M=size, N=size, D=D, Dv=D, dtype=shard.dtype, config=shard.config, device=device,
        mask=Mask(causal="causal" in subject.masks), seed=3,
    )  # fmt: skip
    repeated = subject.promises("G10", shard.config)
    if not repeated:
        pytest.skip(f"{subject.name} does not promise G10, bitwise equal results in every run")

    def as_in_a_fresh_process(trial):
        # Problems with other lengths first, whose results must not be reused for this problem.
        before = sorted(
            (x for x in neighbours(problem) if subject.excludes(x) is None),
            key=lambda x: (x.N == problem.N, x.M == problem.M),
        )
        alone, after = outputs_in_fresh_processes(pytestconfig, [problem], [*before, problem])
        here = digests(run_subject(subject, problem, trial.inputs))
        alone, after, here = (
            {name: x for name, x in found.items() if name in repeated}
            for found in (alone, after, here)
        )
        kernel = f"--kernel={subject.source} " if subject.source else ""
        replay = f"replay: pytest {kernel}--replay='{problem.to_json()}'"
        head = f"G13 state: {subject.name} differs"
        assert after == alone, f"{head} after calls of other shapes\n  {replay}"
        assert here == alone, f"{head} from a fresh process\n  {replay}"
        return guarantees.accuracy(trial)

    check_one(problem, as_in_a_fresh_process)


def outputs_in_fresh_processes(config, *runs):
    """Run lists of problems in concurrent processes; return the digests of each last problem."""
    kernel = config.getoption("--kernel") or OURS
    command = [sys.executable, "-m", "fa_verify.conformance.fresh_process", kernel]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, *(x.to_json() for x in problems)], cwd=ROOT, **pipes)
        for problems in runs
    ]
    found = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found
