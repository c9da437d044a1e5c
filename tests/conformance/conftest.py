"""The subject under test, and the engine that draws problems for a claim."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest

from oracles.problem import Problem
from properties import guarantees
from properties.compare import Finding, Violation
from properties.ledger import Ledger
from properties.strategies import problems
from properties.subject import Subject
from properties.trial import Trial, examine
from tests.conformance.shards import Shard
from tests.subjects.ours import flash_attention

Check = Callable[[Trial], list[Finding]]
# Tile pairs of one problem: what the interpreter, or a GPU, does in about a second.
MAX_COST = {"cpu": 24, "cuda": 400}
TILES_ACROSS = {"cpu": 3, "cuda": 6}
# Past this the oracle, which is dense, costs more on a CPU than the kernels.
MAX_SEQLEN = {"cpu": 200, "cuda": 1024}


@pytest.fixture(scope="session")
def subject() -> Subject:
    """What is verified."""
    return Subject.of(flash_attention, "flash_attention")


@pytest.fixture
def check_problem(subject: Subject, ledger: Ledger) -> Callable[[Problem, Check], None]:
    """Judges one problem on all five outputs, then checks a claim on it."""

    def check(problem: Problem, claim: Check) -> None:
        __tracebackhide__ = True
        try:
            trial = examine(subject, problem)
        except NotImplementedError as refusal:
            ledger.refused(problem, str(refusal))
            return
        if trial is None:
            ledger.rejected(problem)
            return
        ledger.judged(trial)
        findings = claim(trial) or guarantees.accuracy(trial)
        if findings:
            raise Violation(findings)

    return check


@pytest.fixture
def for_all(
    request: pytest.FixtureRequest,
    device: str,
    check_problem: Callable[[Problem, Check], None],
) -> Callable[..., None]:
    """Draws problems of a shard, as many as the profile says, and checks a claim on each.

    The seed of the draw is the test's name and the shard, so that shards differ and runs do not.
    """

    def run(claim: Check, shard: Shard, **wanted: object) -> None:
        __tracebackhide__ = True
        strategy = problems(
            **{
                "dtype": shard.dtype,
                "configs": (shard.config,),
                "head_dims": shard.head_dims,
                "tile": shard.tile,
                "max_seqlen": min(TILES_ACROSS[device] * shard.tile, MAX_SEQLEN[device]),
                "max_cost": MAX_COST[device],
                "device": device,
                **wanted,
            }
        )

        @hypothesis.seed(request.node.nodeid)
        @hypothesis.given(problem=strategy)
        def holds(problem: Problem) -> None:
            __tracebackhide__ = True
            check_problem(problem, claim)

        holds()

    return run
