"""Fixtures of the conformance tests: shards, and checks on drawn problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from fa_verify.breadth import breadth_of
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import Check, Claim, Drawn
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import (
    ExcludedError,
    problems_of,
    problems_of_few_kernels,
)
from fa_verify.properties.kinds.registry import KINDS, kinds_of
from fa_verify.properties.problems.batched import batched_problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.watchdog import Watchdog
from fa_verify.properties.search.search import Runner, attack
from fa_verify.properties.search.sizing import sized
from fa_verify.pytest_plugin.example_database import of_one_test
from fa_verify.session import NOT_ASKED, TURN_OVER, TooFewError, mask_of, subject_of
from fa_verify.shards import Shard, larger_shards_of, shards_of

# Largest number of tile pairs of a problem, which take the interpreter or a GPU about a second. In
# the interpreter the cost of a large tile grows with its elements.
MAX_COST = {"cpu": 20, "cuda": 400}
MAX_COST_OF_LARGE_TILES = {"cpu": 8, "cuda": 400}
LARGE_TILE = 64
# Largest B * H of the few problems with many heads and one tile both ways.
MAX_PAIRS = {"cpu": 40, "cuda": 400}
MAX_PAIRS_OF_LARGE_TILES = {"cpu": 17, "cuda": 400}
# Tile pairs of a problem with two tiles both ways.
LEAST_COST = 4
TILES_ACROSS = {"cpu": 3, "cuda": 6}
# For longer sequences the dense oracle takes longer than the kernels on a CPU.
MAX_SEQLEN = {"cpu": 200, "cuda": 1024}
# Limits of batched problems: the longest sequence; tile pairs in the interpreter; pairs of rows and
# keys over all heads on a GPU.
BATCHED_SEQLEN = {"cpu": 48, "cuda": 512}
BATCHED_COST = 12
BATCHED_SCORES = 2**25
# Largest head dim of the shards that a run with --fa-mask uses.
SMALL_DIM = 32
# Smallest number of judged problems for a test to pass, if its profile draws at least twice as
# many.
LEAST_JUDGED = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with shards, or with the configurations of the subject.

    ``@pytest.mark.shards(start, step)`` selects every step-th shard from start on; ``float64=True``
    selects from the float64 shards. A parameter ``larger`` is a shard of larger head dims.
    """
    subject = subject_of(metafunc.config)
    if "drawn" in metafunc.fixturenames:
        return  # test_claims.py takes shards from its rows
    if "shard" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("shards")
        start, step = (*(marker.args if marker else ()), 0, 1)[:2] if marker else (0, 1)
        float64 = bool(marker and marker.kwargs.get("float64"))
        shards = selected_shards(metafunc.config, start, step, float64=float64)
        metafunc.parametrize("shard", shards, ids=str)
    if "larger" in metafunc.fixturenames:
        metafunc.parametrize("larger", larger_shards_of(subject), ids=str)
    if "config" in metafunc.fixturenames:
        metafunc.parametrize("config", sorted(subject.configs))


def selected_shards(
    config: pytest.Config, start: int, step: int, *, float64: bool = False
) -> tuple[Shard, ...]:
    """Return every step-th shard of the subject from start on; its first, if these are too few."""
    shards = shards_of(subject_of(config), float64=float64)
    if mask_of(config) is not None:
        # Masks do not depend on dtype, configuration and head dims: one shard per test.
        small = tuple(shard for shard in shards if max(shard.head_dims) <= SMALL_DIM) or shards
        shards, start, step = small, start % len(small), len(small)
    return shards[start::step] or shards[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave merges and caches out of a quick run of a subject of something else."""
    if not config.getoption("--fa-quick"):
        return
    subject = subject_of(config)
    left_out = {
        *(("test_merging.py",) if subject.states is None else ()),
        *(() if subject.reads_caches_alone else ("test_caches.py",)),
        *(() if subject.quantised_alone else ("test_quantised.py",)),
        # The fixed list has problems of its own.
        *(() if "attention" not in kinds_of(subject) else ("test_combinations.py",)),
    }
    items[:] = [item for item in items if item.path.name not in left_out]


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    """The subject under test."""
    return subject_of(pytestconfig)


@pytest.fixture(autouse=True)
def attention_alone(request: pytest.FixtureRequest, subject: Subject) -> None:
    """Skip tests of attention to padded tensors for a subject that computes none."""
    for is_alone, why, file in (
        (subject.merges_alone, "states=True: it computes no attention", "test_merging.py"),
        (subject.reads_caches_alone, "cache: it takes no padded tensors", "test_caches.py"),
        (subject.quantised_alone, "quantised=True: it takes codes alone", "test_quantised.py"),
    ):
        # Problems of --fa-replay, of the corpus and of covering arrays may be merges or caches.
        if is_alone and request.path.name not in (file, "test_replay.py", "test_combinations.py"):
            pytest.skip(f"{subject.name} declares {why}")


@pytest.fixture
def is_fast(device: str, pytestconfig: pytest.Config) -> bool:
    """Whether problems of a thousand pairs of tiles take seconds: on a GPU, and in PyTorch."""
    return device == "cuda" or pytestconfig.getoption("--fa-breadth", None) == "wide"


@pytest.fixture
def runner(
    subject: Subject,
    tally: Tally,
    watchdog: Watchdog,
    pytestconfig: pytest.Config,
    request: pytest.FixtureRequest,
) -> Runner:
    """The runner of the subject, with a watchdog that reports the problem of a crash or hang."""
    mask = pytestconfig.getoption("--fa-mask") or ""
    waivers = pytestconfig.pluginmanager.get_plugin("waivers")
    test = request.node.nodeid
    waived = None if waivers is None else lambda finding: waivers.waived(finding, test)
    marker = request.node.get_closest_marker("asks")
    asks = marker.args[0].key if marker else ""
    return Runner(subject, tally, watchdog.watching, mask, waived, asks)


@pytest.fixture
def check_one(runner: Runner) -> Callable[[Problem, Check], None]:
    """A function that runs a check on one problem, narrowed to what the subject declares.

    For a slow kernel on a CPU the problem is smaller.
    It skips the test if the subject refuses the problem, or the check finds too little memory.
    """

    def check(problem: Problem, claim: Check) -> None:
        __tracebackhide__ = True
        try:
            fitting = sized(runner, narrowed(runner.subject, problem))
            findings = runner.findings(fitting, claim)
        except MemoryError as error:
            pytest.skip(str(error))
        if findings:
            raise Violation(findings, claim)
        if runner.refusals:
            pytest.skip(", ".join(runner.refusals))

    return check


def seed_of_kernels(device: str, name: str) -> str | None:
    """Return a seed of the few kernels that problems are drawn for; None where all may be drawn.

    That is the case on a CPU, which compiles none, and in profiles that draw new problems in every
    run.
    """
    return name if device == "cuda" and hypothesis.settings().derandomize else None


@pytest.fixture
def drawing(request: pytest.FixtureRequest, runner: Runner) -> Callable[..., None]:
    """A function that draws calls, runs a check on each, and fails with the simplest.

    A fuzzing run keeps the tests with this fixture.
    """

    def run(claim: Check, strategy: st.SearchStrategy[Any], seed: str) -> None:
        __tracebackhide__ = True
        fuzzing = hypothesis.settings.get_current_profile_name() == "fuzz"
        settings = hypothesis.settings()
        plugin = request.config.pluginmanager.get_plugin("fuzzing")
        judge = plugin.hunter(runner) if plugin else runner
        if fuzzing:
            name = f"{request.node.nodeid} of {runner.subject.name}"
            keeps = (lambda: judge.passed_over) if plugin else None
            settings = of_one_test(settings, name, keeps)
        attack(judge, claim, strategy, seed=seed, steer=fuzzing, settings=settings)
        check_that_problems_were_judged(judge)
        if runner.limits:
            request.node.user_properties.append((NOT_ASKED, runner.limits))
        if plugin:
            # A turn draws too few problems for the assertions that follow in some tests.
            pytest.skip(TURN_OVER)

    return run


@pytest.fixture
def for_claim(
    request: pytest.FixtureRequest, device: str, subject: Subject, drawing: Callable[..., None]
) -> Callable[..., None]:
    """A function that draws calls of a dtype for a claim of any kind but attention."""

    def run(claim: Claim, dtype: str, kernels: str, **wanted: object) -> None:
        """Draw calls. ``kernels`` names the tests that share their compiled kernels."""
        __tracebackhide__ = True
        if claim.kind not in kinds_of(subject):
            pytest.skip(f"{subject.name} takes no {claim.kind}")
        if claim.kind == "cache":
            wanted["kernels"] = seed_of_kernels(device, kernels)
        try:
            strategy = KINDS[claim.kind].draw(
                subject, dtype=dtype, device=device, **claim.needs, **wanted
            )
        except ExcludedError as declared:
            pytest.skip(str(declared))
        mask = wanted.get("mask")
        words = [claim.kind, claim.name, dtype, *([mask.__name__] if mask else [])]
        drawing(claim.check, strategy, "/".join(words))

    return run


@pytest.fixture
def for_all(
    request: pytest.FixtureRequest, device: str, runner: Runner, drawing: Callable[..., None]
) -> Callable[..., None]:
    """A function that draws problems of a shard and runs a check on each.

    The profile determines the number of problems. ``drawn`` says what is drawn, and how its seed
    begins; without it the test does.
    """

    def run(claim: Check, shard: Shard, drawn: Drawn | None = None, **fields: object) -> None:
        __tracebackhide__ = True
        test, _, parameters = request.node.nodeid.partition("::")[2].partition("[")
        place = parameters.removesuffix("]")
        if drawn is None:
            drawn = Drawn(test=f"{request.path.name}::{test}", **fields)
        else:
            place = drawn.of(shard)
        # The same problems wherever the tests are installed, and in whatever file they run.
        seed = f"tests/conformance/{drawn.test}[{place}]"
        large = shard.tile >= LARGE_TILE
        most = (MAX_COST_OF_LARGE_TILES if large else MAX_COST)[device]
        pairs = (MAX_PAIRS_OF_LARGE_TILES if large else MAX_PAIRS)[device]
        of_batched = BATCHED_SCORES // shard.tile**2
        if device == "cpu":
            of_batched = breadth_of(request.config).batched * BATCHED_COST
        wanted = dict(drawn.needs_of(shard))
        if drawn.batched:
            most = min(most, max(LEAST_COST, of_batched // 3))
            wanted = {
                "max_seqlen": BATCHED_SEQLEN[device], "zero_sizes": False, "max_pairs": 0, **wanted
            }  # fmt: skip
        limits = {
            "dtype": shard.dtype,
            "configs": (shard.config,),
            "head_dims": shard.head_dims,
            "tile": shard.tile,
            "max_seqlen": min(TILES_ACROSS[device] * shard.tile, MAX_SEQLEN[device]),
            "max_cost": max(LEAST_COST, most // drawn.runs),
            "max_pairs": pairs // drawn.runs,
            "device": device,
            "mask": mask_of(request.config),
        }
        wanted = {**limits, **wanted}
        kernels = drawn.kernels
        try:
            if kernels and seed_of_kernels(device, seed):
                is_shared = kernels == "shared"
                strategy = problems_of_few_kernels(
                    runner.subject, count=None if is_shared else kernels,
                    seed=str(shard) if is_shared else seed, choices=drawn.choices, **wanted,
                )  # fmt: skip
            else:
                strategy = problems_of(runner.subject, **wanted)
        except ExcludedError as declared:
            pytest.skip(str(declared))
        if drawn.batched:
            strategy = batched_problems(
                strategy, tile=shard.tile, max_cost=of_batched, m_gt_n=runner.subject.m_gt_n
            )
        drawing(claim, strategy, seed)

    return run


def check_that_problems_were_judged(runner: Runner) -> None:
    """Raise ``TooFewError`` if too few problems were judged: others were refused or out of range.

    Skip it if the declared numerics, and not the defaults, put them out of range, if the claim
    is applicable to none, or if they cannot run on this machine.
    """
    __tracebackhide__ = True
    if runner.not_applicable() and not runner.applied:
        pytest.skip("; ".join(f"{name}: {why}" for name, why in runner.not_applicable().items()))
    least = min(LEAST_JUDGED, hypothesis.settings().max_examples // 2)
    if runner.judged >= least:
        return
    if runner.limits:
        pytest.skip(runner.limits)
    if runner.judged + runner.out_by_numerics >= least:
        pytest.skip(
            f"{runner.out_by_numerics} of {runner.judged + runner.out_of_range} problems are out "
            f"of range for the numerics that {runner.subject.name} declares: "
            f"{runner.subject.declared()}"
        )
    refused = sum(runner.refusals.values())
    reasons = "".join(f"\n  {count} refused: {why}" for why, count in runner.refusals.items())
    raise TooFewError(
        f"only {runner.judged} problems were judged, needs {least}: {refused} were refused by "
        f"{runner.subject.name}, {runner.out_of_range} were out of range.{reasons}\n"
        "Declare what the kernel does not support, so that it is not drawn."
        if refused
        else f"only {runner.judged} problems were judged, needs {least}: "
        f"{runner.out_of_range} were out of range",
        pytrace=False,
    )
