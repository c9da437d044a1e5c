"""What the conformance tests share: their shards, and the draw of problems for a claim."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.guarantees import Check
from fa_verify.properties.comparison.compare import Violation
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.watchdog import Watchdog
from fa_verify.properties.problems.batched import batched_problems
from fa_verify.properties.search.search import Runner, attack
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import ExcludedError, problems_of
from fa_verify.pytest_plugin.example_database import of_one_test
from fa_verify.pytest_plugin.fuzz.hunter import TURN_OVER
from fa_verify.session import mask_of, subject_of
from fa_verify.shards import Shard, shards_of

# Tile pairs of one problem: what the interpreter, or a GPU, does in about a second. A large tile
# costs the interpreter its elements too.
MAX_COST = {"cpu": 20, "cuda": 400}
MAX_COST_OF_LARGE_TILES = {"cpu": 8, "cuda": 400}
LARGE_TILE = 64
# What two tiles both ways take.
LEAST_COST = 4
TILES_ACROSS = {"cpu": 3, "cuda": 6}
# Past this the oracle, which is dense, costs more on a CPU than the kernels.
MAX_SEQLEN = {"cpu": 200, "cuda": 1024}
# Of batched problems: the longest sequence; tile pairs of one, in the interpreter; pairs of rows
# and keys of one, all heads counted, on a GPU.
BATCHED_SEQLEN = {"cpu": 48, "cuda": 512}
BATCHED_COST = 12
BATCHED_SCORES = 2**25
# Of the shards that a run about one mask takes.
SMALL_DIM = 32
# What a test has to have judged to have tested anything, where its profile draws that many.
LEAST_JUDGED = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests their shards, the configurations of the subject, or its dtypes.

    ``@pytest.mark.shards(start, step)`` takes a part of the shards, ``float64=True`` those of
    float64.
    """
    subject = subject_of(metafunc.config)
    if "shard" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("shards")
        start, step = (*(marker.args if marker else ()), 0, 1)[:2] if marker else (0, 1)
        float64 = bool(marker and marker.kwargs.get("float64"))
        shards = shards_of(subject, float64=float64)
        if mask_of(metafunc.config) is not None:
            # A mask's own part does not depend on what the others vary: one shard a test.
            small = tuple(shard for shard in shards if max(shard.head_dims) <= SMALL_DIM) or shards
            shards, start, step = small, start % len(small), len(small)
        # A subject with few shards gets the first where its share is empty.
        metafunc.parametrize("shard", shards[start::step] or shards[:1], ids=str)
    if "config" in metafunc.fixturenames:
        metafunc.parametrize("config", sorted(subject.configs))


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    """What is verified."""
    return subject_of(pytestconfig)


@pytest.fixture
def runner(subject: Subject, tally: Tally, watchdog: Watchdog) -> Runner:
    """Judges problems of the subject; a crash or a hang is reported with the problem under way."""
    return Runner(subject, tally, watchdog.watching)


@pytest.fixture
def check_one(runner: Runner) -> Callable[[Problem, Check], None]:
    """Checks a claim on one problem; skips where the subject declares or says that it cannot."""

    def check(problem: Problem, claim: Check) -> None:
        __tracebackhide__ = True
        findings = runner.findings(problem, claim)
        if findings:
            raise Violation(findings)
        if runner.refusals:
            pytest.skip(", ".join(runner.refusals))

    return check


@pytest.fixture
def for_all(request: pytest.FixtureRequest, device: str, runner: Runner) -> Callable[..., None]:
    """Draws problems of a shard, as many as the profile says, and checks a claim on each.

    ``runs`` is how often the claim runs a problem, which may cost the less for it. ``batched``
    draws many at a time, up to a length of 512, and checks the claim on them together.
    """

    def run(
        claim: Check, shard: Shard, *, runs: int = 1, batched: bool = False, **wanted: object
    ) -> None:
        __tracebackhide__ = True
        most = (MAX_COST_OF_LARGE_TILES if shard.tile >= LARGE_TILE else MAX_COST)[device]
        of_batched = BATCHED_COST if device == "cpu" else BATCHED_SCORES // shard.tile**2
        if batched:
            most = min(most, max(LEAST_COST, of_batched // 3))
            wanted = {"max_seqlen": BATCHED_SEQLEN[device], "zero_sizes": False, **wanted}
        limits = {
            "dtype": shard.dtype,
            "configs": (shard.config,),
            "head_dims": shard.head_dims,
            "tile": shard.tile,
            "max_seqlen": min(TILES_ACROSS[device] * shard.tile, MAX_SEQLEN[device]),
            "max_cost": max(LEAST_COST, most // runs),
            "device": device,
            "mask": mask_of(request.config),
        }
        try:
            strategy = problems_of(runner.subject, **{**limits, **wanted})
        except ExcludedError as declared:
            pytest.skip(str(declared))
        if batched:
            strategy = batched_problems(strategy, tile=shard.tile, max_cost=of_batched)
        fuzzing = hypothesis.settings.get_current_profile_name() == "fuzz"
        settings = hypothesis.settings()
        plugin = request.config.pluginmanager.get_plugin("fuzzing")
        judge = plugin.hunter(runner) if plugin else runner
        if fuzzing:
            name = f"{request.node.nodeid} of {runner.subject.name}"
            keeps = (lambda: judge.passed_over) if plugin else None
            settings = of_one_test(settings, name, keeps)
        seed = request.node.nodeid
        attack(judge, claim, strategy, seed=seed, steer=fuzzing, settings=settings)
        check_that_problems_were_judged(judge)
        if plugin:
            # What a test asks of all its problems together is not asked of a turn's few.
            pytest.skip(TURN_OVER)

    return run


def check_that_problems_were_judged(runner: Runner) -> None:
    """Fails a test whose problems were refused, or out of range, until too few were left."""
    __tracebackhide__ = True
    least = min(LEAST_JUDGED, hypothesis.settings().max_examples // 2)
    if runner.judged >= least:
        return
    refused = sum(runner.refusals.values())
    reasons = "".join(f"\n  {count} refused: {why}" for why, count in runner.refusals.items())
    pytest.fail(
        f"only {runner.judged} problems were judged, needs {least}: {refused} were refused by "
        f"{runner.subject.name}, {runner.out_of_range} were out of range.{reasons}\n"
        "What a subject cannot do it can declare, so that it is not drawn."
        if refused
        else f"only {runner.judged} problems were judged, needs {least}: "
        f"{runner.out_of_range} were out of range",
        pytrace=False,
    )
