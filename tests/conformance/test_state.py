"""G13: the 100th call equals the first, and any call equals one in a fresh state."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from fa_verify.conformance.conftest import LARGE_TILE
from fa_verify.conformance.fresh_process import digests
from fa_verify.oracles.guarantee import G13
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.agreement import agree
from fa_verify.properties.guarantees.invariance import OTHER_DTYPE, neighbours, one_change_each
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.running.replay_line import replay_line
from fa_verify.properties.running.trial import run_subject
from fa_verify.session import OURS
from fa_verify.shards import shards_of

CALLS = 100
# Masks of the problems whose calls change in one argument each; shards take turns.
MASKS = (Mask(), PrefixLM(prefix=5), BlockSparse(side=32, percent=60, seed=2))


@pytest.mark.asks(G13)
def test_the_hundredth_call_gives_what_the_first_gave(check_one, subject, device):
    problem = Problem(
        N=2, dtype=subject.dtypes[0], device=device, config=next(iter(subject.configs))
    )

    def hundred_calls(trial):
        for _ in range(CALLS - 1):
            again = run_subject(subject, problem, trial.inputs)
        return agree(trial, again, "G13 state", f"differs at call {CALLS}")

    check_one(problem, hundred_calls)


@pytest.mark.asks(G13)
@pytest.mark.shards(1, 5)
def test_calls_that_differ_in_one_argument_do_not_depend_on_their_order(
    check_one, subject, device, shard, pytestconfig
):
    repeated = subject.promises("G10", shard.config)
    if not repeated and device != "cpu":  # the other calls need kernels that no test compiles
        pytest.skip(f"{subject.name} does not promise G10, bitwise equal results in every run")
    problem, *others = calls_of(subject, shard, device)
    if not repeated:
        # Each call lies within its bound, whichever is before it.
        check_one(problem, claims.sequence)
        return

    # In the first process, each call follows one that differs from it in one argument. In the
    # second, each has a fork of its own; or the order is reversed, where CUDA forbids forks and
    # where the interpreter would read large tiles in each of them.
    apart = ["--apart"] if device == "cpu" and shard.tile < LARGE_TILE else []
    first = [problem, *(x for other in others for x in (other, problem))]
    second = [*others[::-1], problem]
    digested = outputs_in_fresh_processes(pytestconfig, first, [*apart, *second])

    def in_two_orders(trial):
        want = dict(zip(second, digested[1], strict=True))
        # The first call of all is that of the problem.
        want[problem] = digested[0][0]
        runs = [*zip(first, digested[0], strict=True), (problem, digested[1][-1])]
        if not apart:
            runs.append((problem, digests(run_subject(subject, problem, trial.inputs))))
        for called, found in runs:
            names = subject.promises("G10", called.config)
            fresh = want[called] or {}
            bad = [name for name in names if found and found.get(name) != fresh.get(name)]
            assert not bad, (
                f"G13 state: {', '.join(bad)} of {subject.name} depends on the calls before\n"
                f"  the call: {called.to_json()}\n"
                f"  replay: {replay_line(problem.to_json(), subject.source)}"
            )
        return claims.accuracy(trial)

    check_one(problem, in_two_orders)


def calls_of(subject, shard, device):
    """Return a problem of a shard, and the supported problems that differ from it in one field."""
    mask = MASKS[shards_of(subject).index(shard) // 5 % len(MASKS)]
    if "custom" not in subject.masks:
        mask = MASKS[0]
    # Several blocks of a BlockSparse mask; else two tiles at most.
    size = 37 if isinstance(mask, BlockSparse) else 20
    if subject.seqlen_multiple > 1:
        size = 2 * subject.seqlen_multiple
    # Packed sequences with a predicate need lengths.
    lengths = (size - 3, size) if "packed" in shard.config else None
    D = shard.head_dims[0]
    problem = narrowed(subject, Problem(
        B=2, H=2 if subject.gqa else 1, M=size, N=size, D=D, Dv=D, dtype=shard.dtype,
        config=shard.config, seed=3, device=device,
        mask=dataclasses.replace(mask, seqlens_q=lengths, seqlens_k=lengths),
    ))  # fmt: skip
    # The configurations of the same tiles, and the first one.
    tiles = shard.config.partition("-")[0]
    configs = [x for x in subject.configs if x.partition("-")[0] == tiles]
    # A GPU compiles four kernels for each dtype: there the calls change to one other. In 16 bits it
    # has as many, so that a cache whose key lacks the dtype would confuse them.
    dtypes = DTYPES if device == "cpu" else (OTHER_DTYPE[shard.dtype],)
    others = one_change_each(problem, (*configs, *[*subject.configs][:1]), dtypes)
    if device == "cpu" and shard.tile >= LARGE_TILE:
        others = neighbours(problem)
    return [problem, *(x for x in others if subject.excludes(x) is None)]


def outputs_in_fresh_processes(config, *runs):
    """Run lists of problems in concurrent processes; return the digests of each problem."""
    kernel = config.getoption("--fa-kernel") or OURS
    command = [sys.executable, "-m", "fa_verify.conformance.fresh_process", kernel]
    environment = dict(os.environ)
    if any("--apart" in run for run in runs):
        # A fork copies one thread, and sums of large tiles depend on the number of threads.
        environment["OMP_NUM_THREADS"] = "1"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # The kernel may be a path that is relative to the folder of the run.
    pipes |= {"cwd": config.invocation_params.dir, "env": environment}
    processes = [
        subprocess.Popen(
            [*command, *(x if isinstance(x, str) else x.to_json() for x in run)], **pipes
        )
        for run in runs
    ]
    # All are waited for before any is judged, so that no pipe stays open.
    ended = [(*process.communicate(), process.returncode) for process in processes]
    for _, err, code in ended:
        assert code == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _, _ in ended]
