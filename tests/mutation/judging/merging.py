"""Judges a mutant of the kernels by merges of attention states and by a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import Check, checks_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner
from tests.mutation.catalogue.mutant import Kill

__all__ = ["FILES", "kills_by_merging", "kills_of_call"]

# Files whose mutants merges judge, before the steps.
FILES = frozenset(
    f"fa_kernels/{name}.py"
    for name in (
        "kernels/portable/combine", "kernels/portable/combine_bwd", "launch/combine", "merging",
        "operators",
    )
)  # fmt: skip
_PROBLEMS = (
    MergeProblem(parts=(3, 0, 16), B=2, H=3, M=5, Dv=7, dtype="fp64", hidden=5, layout="gaps",
                 dout_layout="columns", seed=8),
    MergeProblem(parts=(3, 2, 5, 1, 7, 9, 4, 6, 8, 2), B=2, H=3, M=5, Dv=17, dtype="fp64",
                 layout="parts inside", dout_layout="heads inside", seed=5),
    MergeProblem(parts=(16, 1, 0), B=1, H=2, M=3, Dv=40, dtype="fp16", lse="lowest", hidden=3,
                 layout="heads inside", dout_layout="shared", seed=6),
    MergeProblem(parts=(1, 4, 2), B=2, H=2, M=3, Dv=3, dtype="bf16", lse="low", hidden=4, seed=7),
    MergeProblem(parts=(7, 5), B=2, H=1, M=4, Dv=16, dtype="fp32", lse="wide", out="tiny", seed=4),
    MergeProblem(parts=(7, 5, 3), B=1, H=2, M=4, Dv=5, dtype="fp32", lse="high", out="opposite",
                 layout="shared", seed=9),
    MergeProblem(parts=(2, 5, 3), B=1, H=1, M=5, Dv=16, dtype="bf16", out="largest", lse="equal"),
    MergeProblem(parts=(2, 5, 3), B=1, H=1, M=2, Dv=512, dtype="fp16", lse="rising", seed=1),
    MergeProblem(parts=(), B=1, H=1, M=2, Dv=1, dtype="fp16"),
    MergeProblem(parts=(2, 3), B=0, H=1, M=2, Dv=2, dtype="fp16"),
)  # fmt: skip
# One far axis of each tensor.
_FAR = tuple(
    MergeProblem(parts=(2, 5, 3), B=2, H=2, M=2, Dv=3, dtype="fp32", seed=seed)
    for seed in range(0, 20)
)
_RING = RingProblem(
    attention=Problem(B=2, H=4, Hk=2, M=20, N=24, D=5, Dv=3, dtype="fp64", mask=Mask(causal=True),
            config="16x16", seed=3),
    lengths=(5, 0, 17, 2),
)  # fmt: skip


def kills_by_merging(subject: Subject) -> dict[str, Callable[[], Iterator[Kill]]]:
    """The merges and the ring, by name; each yields its first finding, as a check of no step."""
    checks = checks_of(kind="merge")
    merges = {
        f"merging {number}, {name}": partial(kills_of_call, f"S1 {name}", subject, x, check)
        for number, x in enumerate(_PROBLEMS)
        for name, check in checks.items()
        if name != "far apart"
    }
    far = {
        f"merging far apart {x.seed}": partial(
            kills_of_call, "S1 far apart", subject, x, checks["far apart"]
        )
        for x in _FAR
    }
    ring = checks_of(kind="ring")["ring"]
    return {**merges, "ring": partial(kills_of_call, "S1 ring", subject, _RING, ring), **far}


def kills_of_call(name: str, subject: Subject, call: Call, check: Check) -> Iterator[Kill]:
    """Judge a call by a check; yield the first finding, or why the call was refused."""
    runner = Runner(subject, Tally())
    findings = runner.findings(call, check)
    for finding in findings[:1]:
        yield Kill(name, -1, str(finding)[:500])
    if not findings and runner.refusals and not runner.judged:
        yield Kill("raised", -1, next(iter(runner.refusals))[:500])
