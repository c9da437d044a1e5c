"""The subject under test, and the engine that draws problems for a claim."""

from __future__ import annotations

import time
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
# Tile pairs of one problem: what the interpreter, or a GPU, does in about a second. A large tile
# costs the interpreter its elements too.
MAX_COST = {"cpu": 24, "cuda": 400}
MAX_COST_OF_LARGE_TILES = {"cpu": 8, "cuda": 400}
LARGE_TILE = 64
TILES_ACROSS = {"cpu": 3, "cuda": 6}
# Past this the oracle, which is dense, costs more on a CPU than the kernels.
MAX_SEQLEN = {"cpu": 200, "cuda": 1024}
SHRINK_SECONDS = 30.0


@pytest.fixture(scope="session")
def subject() -> Subject:
    """What is verified."""
    return Subject.of(flash_attention, "flash_attention")


@pytest.fixture
def findings_of(subject: Subject, ledger: Ledger) -> Callable[[Problem, Check], list[Finding]]:
    """Judges one problem on all five outputs and checks a claim on it."""

    def check(problem: Problem, claim: Check) -> list[Finding]:
        try:
            trial = examine(subject, problem)
        except NotImplementedError as refusal:
            ledger.refused(problem, str(refusal))
            return []
        if trial is None:
            ledger.rejected(problem)
            return []
        ledger.judged(trial)
        return claim(trial) or guarantees.accuracy(trial)

    return check


@pytest.fixture
def for_all(
    request: pytest.FixtureRequest,
    device: str,
    findings_of: Callable[[Problem, Check], list[Finding]],
) -> Callable[..., None]:
    """Draws problems of a shard, as many as the profile says, and checks a claim on each.

    In the deterministic profiles the draw is seeded by the test's name and shard, so that shards
    differ and runs do not; in the others every run draws anew.
    """

    def run(claim: Check, shard: Shard, **wanted: object) -> None:
        __tracebackhide__ = True
        max_cost = (MAX_COST_OF_LARGE_TILES if shard.tile >= LARGE_TILE else MAX_COST)[device]
        longest = min(TILES_ACROSS[device] * shard.tile, MAX_SEQLEN[device])
        strategy = problems(
            **{
                "dtype": shard.dtype,
                "configs": (shard.config,),
                "head_dims": shard.head_dims,
                "tile": shard.tile,
                "max_seqlen": longest,
                "max_cost": max_cost,
                "device": device,
                **wanted,
            }
        )
        outcomes = Outcomes(lambda problem: findings_of(problem, claim))

        @hypothesis.given(problem=strategy)
        def holds(problem: Problem) -> None:
            __tracebackhide__ = True
            findings = outcomes.of(problem)
            if findings:
                raise Violation(findings)

        if hypothesis.settings().derandomize:
            hypothesis.seed(request.node.nodeid)(holds)
        holds()

    return run


class Outcomes:
    """Findings by problem, so that the search for a smaller failing problem ends in time.

    Once SHRINK_SECONDS have passed since the first failure, problems not seen before count as
    passing: the search then stops at the smallest failure found, which is remembered.
    """

    def __init__(self, check: Callable[[Problem], list[Finding]]) -> None:
        self.check = check
        self.seen: dict[Problem, list[Finding]] = {}
        self.first_failure: float | None = None

    def of(self, problem: Problem) -> list[Finding]:
        """The findings of a problem, computed once."""
        if problem not in self.seen:
            first = self.first_failure
            if first is not None and time.monotonic() - first > SHRINK_SECONDS:
                return []
            self.seen[problem] = self.check(problem)
            if self.seen[problem] and first is None:
                self.first_failure = time.monotonic()
        return self.seen[problem]
