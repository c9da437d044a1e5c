"""Parts of a run with --fa-minutes: the clock, the order of tests, and the entries of a turn."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.corpus import Cause, CorpusEntry
from fa_verify.properties.search.search import Runner, attack, draws
from fa_verify.pytest_plugin.fuzz.causes import Causes
from fa_verify.pytest_plugin.fuzz.clock import TO_SHRINK, Clock, seconds_of_a_turn
from fa_verify.pytest_plugin.fuzz.hunter import FEWEST, TURN_OVER, Hunter
from fa_verify.pytest_plugin.fuzz.plugin import Fuzzing
from fa_verify.pytest_plugin.fuzz.rotation import Rotation
from tests.unit.properties.kernels.broken_subjects import Eager

REGRESSIONS = [f"t.py::test_regression[{name}]" for name in "abc"]
DRAWING = [f"t.py::test_claim[{number}]" for number in range(5)]
PROBLEM = Problem(M=3, N=4, dtype="fp64")
LARGER = Problem(M=7, N=9, dtype="fp64", seed=5)


@pytest.fixture
def clock(tmp_path):
    return Clock(tmp_path / "end")


def test_nothing_ends_before_the_clock_starts(clock):
    assert not clock.over()
    assert clock.passed() == 0


def test_processes_share_the_end(clock):
    other = Clock(clock.path)
    clock.start(-1)
    assert other.over()
    assert not other.hurried()


def test_a_stopped_clock_does_not_start_again(clock):
    clock.stop()
    clock.start(1000)
    assert clock.over()
    assert clock.hurried()
    assert clock.stopped


def test_a_find_is_made_smaller_beyond_the_end_for_a_while(clock):
    clock.start(-TO_SHRINK - 1)
    assert clock.hurried()
    assert not clock.stopped


@pytest.mark.parametrize(
    ("seconds", "workers", "tests", "turn"),
    [(600, 2, 150, 4.0), (6, 1, 100, 1.0), (6000, 16, 100, 10.0), (60, 2, 0, 10.0)],
)
def test_every_test_has_two_turns_within_a_second_and_ten(seconds, workers, tests, turn):
    assert seconds_of_a_turn(seconds, workers, tests) == turn


class Worker:
    """A stub of an xdist node that records its messages."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.dealt: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices):
        self.dealt += indices

    def shutdown(self):
        self.shutting_down = True


@pytest.fixture
def deal(clock):
    """Makes a rotation over two workers that have collected tests."""
    options = {"tx": ["popen", "popen"], "maxschedchunk": 2}
    config = SimpleNamespace(
        getvalue=options.get, getoption=options.get, option=SimpleNamespace(**options)
    )

    def of(tests, seconds=1000.0):
        rotation = Rotation(config, SimpleNamespace(loadsched=print), clock, seconds)
        workers = [Worker("gw0"), Worker("gw1")]
        for worker in workers:
            rotation.add_node(worker)
            rotation.add_node_collection(worker, tests)
        rotation.schedule()
        return rotation, workers

    return of


def play(rotation, workers, tests: int) -> list[int]:
    """The order of the next ``tests`` tests, with workers taking turns."""
    ran = []
    while len(ran) < tests:
        for worker in workers:
            ran.append(worker.dealt.pop(0))
            rotation.mark_test_complete(worker, ran[-1])
    return ran


def test_regressions_come_first_and_once(deal):
    ran = play(*deal([*DRAWING, *REGRESSIONS]), 43)
    assert sorted(ran[:3]) == [5, 6, 7]
    assert {*ran[3:]} == {0, 1, 2, 3, 4}


def test_every_test_has_its_turn_before_any_has_a_second(deal):
    rotation, workers = deal(DRAWING)
    ran = play(rotation, workers, 20)
    rounds = [ran[start : start + 5] for start in range(0, 20, 5)]
    # Only here do workers wait for one another, so that rounds do not overlap.
    assert [sorted(part) for part in rounds] == [[0, 1, 2, 3, 4]] * 4
    assert len({tuple(part) for part in rounds}) > 1


def test_batched_problems_are_every_second_turn_and_all_others_come_round(deal):
    name = "test_claims.py::test_claim[G1-batched_problems_lie_within_the_derived_bound-fp16-d{}]"
    tests = ["a", "b", name.format(16), "c", name.format(64), "e", "g"]
    batched, others = {2, 4}, [0, 1, 3, 5, 6]
    ran = play(*deal(tests), 30)
    for start in (0, 10, 20):
        part = ran[start : start + 10]
        assert {*part[::2]} == batched
        assert sorted(part[1::2]) == others


@pytest.mark.parametrize(
    "tests", [["a", "b"], ["f.py::x[batched_problems]", "f.py::y[batched_problems]"]]
)
def test_where_all_draw_batched_problems_or_none_does_all_come_round(deal, tests):
    ran = play(*deal(tests), 4)
    assert [sorted(ran[:2]), sorted(ran[2:])] == [[0, 1]] * 2


def test_workers_stop_when_the_time_is_over(deal, clock):
    rotation, workers = deal(DRAWING)
    clock.stop()
    play(rotation, workers, 2)
    assert all(worker.shutting_down for worker in workers)
    assert rotation.tests_finished


def test_a_test_that_is_left_out_is_dealt_no_more(deal):
    rotation, workers = deal(DRAWING)
    (waiting,) = rotation.pending
    rotation.leave_out(DRAWING[waiting])
    rotation.leave_out(DRAWING[waiting])
    assert waiting not in play(rotation, workers, 20)


def test_the_first_of_all_are_dealt_to_different_workers(deal):
    _, workers = deal(REGRESSIONS[:2] + DRAWING)
    assert sorted(worker.dealt[0] for worker in workers) == [0, 1]


def test_a_run_ends_when_all_are_left_out(deal):
    rotation, workers = deal(DRAWING)
    for test in DRAWING:
        rotation.leave_out(test)
    play(rotation, workers, 4)
    assert rotation.tests_finished
    assert all(worker.shutting_down for worker in workers)


def test_a_run_of_regressions_alone_ends(deal):
    rotation, workers = deal(REGRESSIONS)
    assert sorted(workers[0].dealt + workers[1].dealt) == [0, 1, 2]
    assert rotation.tests_finished


def test_a_dead_worker_names_its_test_and_leaves_its_regressions_to_others(deal):
    rotation, (dead, alive) = deal(REGRESSIONS + DRAWING)
    at, ahead = dead.dealt
    assert rotation.remove_node(dead) == (REGRESSIONS + DRAWING)[at]
    ran = play(rotation, [alive], 4)
    assert at not in ran
    assert (ahead in ran) == (ahead < 3)


def test_a_worker_in_place_of_a_dead_one_is_dealt_to(deal):
    rotation, (dead, _) = deal(DRAWING)
    rotation.remove_node(dead)
    new = Worker("gw2")
    rotation.add_node(new)
    rotation.schedule()
    assert new.dealt == []
    rotation.add_node_collection(new, DRAWING)
    rotation.schedule()
    assert len(new.dealt) == 2


@pytest.fixture
def hunter(tmp_path, clock):
    """Makes the runner of a turn; all turns belong to one run."""
    (tmp_path / "run").mkdir()

    def of(attention=None, seconds=1000.0):
        runner = Runner(Subject.of(attention or Eager("out scaled"), "eager"), Tally())
        return Hunter(
            runner,
            folder=tmp_path / "corpus",
            causes=Causes(tmp_path / "run"),
            clock=clock,
            seconds=seconds,
            unkept=lambda *noted: unkept.append(noted),
        )

    unkept: list[tuple] = []
    of.unkept = unkept
    return of


def kept(hunter) -> list[Problem]:
    return [CorpusEntry.read(path).problem for path in sorted(hunter.folder.glob("*"))]


def test_the_first_problem_that_fails_is_on_disk_at_once(hunter):
    hunt = hunter()
    assert hunt.findings(LARGER, claims.accuracy)
    assert kept(hunt) == [LARGER]


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Writes that make a file larger fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_finding_that_cannot_be_written_is_a_finding_of_the_kernel(hunter):
    hunt = hunter()
    with files_of_at_most(16):
        found = hunt.findings(PROBLEM, claims.accuracy)
    assert found[0].problem == PROBLEM
    ((cause, finding, error),) = hunter.unkept
    assert (cause, finding) == (hunt.cause, found[0])
    assert error.errno == errno.EFBIG
    assert kept(hunt) == []
    # There is room again.
    assert hunt.findings(PROBLEM, claims.accuracy)
    assert kept(hunt) == [PROBLEM]


def test_a_corpus_that_cannot_be_written_is_said_once_with_what_it_lacks(pytestconfig, tmp_path):
    terminal = Terminal()
    config = SimpleNamespace(
        getoption=lambda name, default=None: 1 if name == "--fa-minutes" else default,
        pluginmanager=SimpleNamespace(get_plugin=lambda name: terminal),
    )
    worker, controller = (Fuzzing(config, Tally(), tmp_path) for _ in range(2))
    runner = Runner(Subject.of(Eager("out scaled"), "eager"), Tally())
    finding, *_ = runner.findings(PROBLEM, claims.accuracy)
    for _ in range(2):
        worker._note_unkept(
            Cause.of(finding), finding, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        )
        # The parts of a report that a worker sends.
        report = SimpleNamespace(when="call", nodeid="t.py::test[1]", failed=True, passed=False)
        making = worker.pytest_runtest_makereport(SimpleNamespace(excinfo=None))
        next(making)
        with contextlib.suppress(StopIteration):
            making.send(report)
        report.longrepr, report.skipped = "", False
        controller.pytest_runtest_logreport(report)
    controller.pytest_terminal_summary(terminal)
    for plugin in (worker, controller):
        plugin.pytest_unconfigure()
    said = "\n".join(terminal.lines)
    assert said.count("cannot be written") == 1
    assert said.count("1 not kept") == said.count(f"replay: {finding.replay}") == 1
    assert "No space left on device" in said


class Terminal:
    """A terminal that keeps its lines."""

    def __init__(self):
        self.lines, self.stats = [], {}

    def ensure_newline(self):
        pass

    flush = section = lambda self, *_: None

    def write_line(self, line):
        self.lines.append(line)


def test_the_smaller_takes_its_place_and_the_larger_does_not(hunter):
    hunt = hunter()
    for problem in (LARGER, PROBLEM, LARGER):
        assert hunt.findings(problem, claims.accuracy)
    assert kept(hunt) == [PROBLEM]
    assert hunt.causes.files() == [*hunt.folder.glob("*")]


def test_a_cause_that_is_known_is_passed_over(hunter):
    hunter().findings(PROBLEM, claims.accuracy)
    second = hunter()
    assert second.findings(LARGER, claims.accuracy) == []
    assert second.passed_over
    assert kept(second) == [PROBLEM]


def test_a_search_holds_to_its_cause_and_keeps_another_as_it_is(hunter):
    hunt = hunter()
    hunt.cause = Cause("G1", "dq", "inner")
    assert hunt.findings(LARGER, claims.accuracy) == []
    assert hunt.passed_over
    assert kept(hunt) == [LARGER]
    # The next turn to fail with that cause minimises its problem.
    assert hunter().findings(PROBLEM, claims.accuracy)
    assert kept(hunt) == [PROBLEM]


class WrongAt(Eager):
    """A subject that errs for certain numbers of keys."""

    def __init__(self, *keys: int) -> None:
        super().__init__()
        self.keys = keys

    def __call__(self, q, k, v, *, mask, sm_scale, config="default"):
        self.fault = "out scaled" if k.shape[2] in self.keys else ""
        return super().__call__(q, k, v, mask=mask, sm_scale=sm_scale, config=config)


class RaisesAt(WrongAt):
    """A subject that raises for the number of keys of the larger problem."""

    def __call__(self, q, k, v, *, mask, sm_scale, config="default"):
        if k.shape[2] == LARGER.N:
            raise ValueError("no")
        return super().__call__(q, k, v, mask=mask, sm_scale=sm_scale, config=config)


@pytest.mark.parametrize(
    ("now", "stays"),
    [
        (WrongAt(PROBLEM.N, LARGER.N), False),
        (WrongAt(PROBLEM.N), True),
        (RaisesAt(PROBLEM.N), True),
    ],
    ids=["fails", "mended", "fails otherwise"],
)
def test_a_find_of_an_earlier_run_gives_way_if_it_still_fails(hunter, tmp_path, now, stays):
    hunter(WrongAt(LARGER.N)).findings(LARGER, claims.accuracy)
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    hunter(now).findings(PROBLEM, claims.accuracy)
    assert {*kept(hunter())} == ({PROBLEM, LARGER} if stays else {PROBLEM})


def test_a_kernel_that_fails_now_and_then_has_one_file(hunter):
    attention = Eager("out scaled")
    hunt = hunter(attention)
    assert hunt.findings(LARGER, claims.accuracy)
    found = Runner(hunt.subject, Tally()).findings(PROBLEM, claims.accuracy)
    attention.fault = ""
    hunt._keep(hunt.cause, found[0], claims.accuracy)
    assert kept(hunt) == [PROBLEM]


def nothing(trial):
    """A claim that holds."""
    return []


DRAWN = st.builds(Problem, seed=st.integers(0, 1000), dtype=st.just("fp64"))


def test_a_search_ends_with_its_turn_after_a_few_problems(hunter):
    hunt = hunter(Eager(), seconds=-1.0)
    with pytest.raises(pytest.skip.Exception, match=TURN_OVER):
        attack(hunt, nothing, DRAWN, seed="", settings=draws(50))
    assert hunt.judged == FEWEST


def test_a_search_ends_with_the_run_at_once(hunter, clock):
    hunt = hunter(Eager())
    clock.start(-1)
    with pytest.raises(pytest.skip.Exception, match=TURN_OVER):
        attack(hunt, nothing, DRAWN, seed="", settings=draws(50))
    assert hunt.judged == 0


def test_a_failure_is_minimised_past_the_end_of_the_run(hunter, clock):
    hunt = hunter()
    hunt.findings(LARGER, claims.accuracy)
    clock.start(-1)
    assert hunt.findings(PROBLEM, claims.accuracy)
    clock.stop()
    assert hunt.findings(Problem(dtype="fp64"), claims.accuracy) == []
    assert kept(hunt) == [PROBLEM]


def test_a_search_ends_at_the_problem_that_is_kept(hunter):
    hunt = hunter()
    sizes = st.integers(1, 40)
    drawn = st.builds(Problem, M=sizes, N=sizes, dtype=st.just("fp64"))
    with pytest.raises(Violation) as info:
        attack(hunt, claims.accuracy, drawn, seed="", settings=draws(20))
    reported = info.value.findings[0]
    (path,) = [file for file in hunt.causes.files() if CorpusEntry.read(file).cause == hunt.cause]
    assert CorpusEntry.read(path).problem == reported.problem
    assert Cause.of(reported) == hunt.cause
