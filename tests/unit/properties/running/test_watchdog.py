"""The watchdog: its record file, the end of overdue processes, and its cost."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.running import watchdog as watchdog_module
from fa_verify.properties.running.watchdog import (
    COMPILATION,
    COMPILERS,
    EXIT_CUDA_ERROR,
    EXIT_HANG,
    WALL,
    Record,
    Watchdog,
    sticky_cuda_error,
)
from fa_verify.properties.running.workers import GPUS_OF_THE_RUN

ROOT = Path(__file__).parents[4]
PROBLEM = Problem(M=65, N=63, mask=Mask(causal=True), inputs="needle", seed=7)
OTHER = Problem(M=1, N=2)


class Ended:
    """A stub for the end of the process that keeps the exit code and the remaining record."""

    def __init__(self, path: Path) -> None:
        self.path, self.code, self.record = path, None, None
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.code, self.record = code, Record.read(self.path)
        self.happened.set()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.json"


@pytest.fixture
def watchdog_with(path):
    """Makes the watchdog of this test; closes it afterwards."""
    made = []

    def make(**keywords):
        made.append(Watchdog(path, **keywords))
        return made[-1]

    yield make
    for watchdog in made:
        watchdog.close()


def test_a_problem_under_way_stands_in_the_file_as_json(path, watchdog_with):
    with watchdog_with().watching(PROBLEM, "forward"):
        _, _, text = path.read_text().partition(" ")
    fields = json.loads(text)
    assert fields["state"] == "running"
    assert fields["note"] == "forward"
    assert "test_a_problem_under_way_stands_in_the_file_as_json" in fields["test"]
    assert Problem.from_record(fields["problem"]) == PROBLEM


def test_a_record_is_read_as_it_was_written(path):
    record = Record(
        "hang", PROBLEM.to_json(), "a.py::b", "it's", 12.5, "over 1 s", ("x.py:1 in f",)
    )
    path.write_bytes(record.to_line())
    assert Record.read(path) == record


def test_no_record_is_read_between_problems(path, watchdog_with):
    watchdog = watchdog_with()
    assert Record.read(path) is None
    with watchdog.watching(PROBLEM):
        assert Record.read(path) is not None
    assert Record.read(path) is None


def test_an_exception_ends_the_record(path, watchdog_with):
    watchdog = watchdog_with()
    with pytest.raises(KeyError), watchdog.watching(PROBLEM):
        raise KeyError
    assert Record.read(path) is None


def test_a_short_record_leaves_nothing_of_a_long_one(path, watchdog_with):
    watchdog = watchdog_with()
    read = []
    for note in ("a long note", ""):
        with watchdog.watching(PROBLEM, note):
            read.append(Record.read(path))
    assert [record.note for record in read] == ["a long note", ""]
    assert {record.problem for record in read} == {PROBLEM.to_json()}
    assert Record.read(path) is None


def test_an_outer_problem_goes_on_after_an_inner_one(path, watchdog_with):
    watchdog = watchdog_with()
    with watchdog.watching(PROBLEM):
        with watchdog.watching(OTHER):
            assert Record.read(path).problem == OTHER.to_json()
        assert Record.read(path).problem == PROBLEM.to_json()


@pytest.mark.parametrize("before", ["no record", "an ended record", "a record"])
def test_a_write_that_was_cut_off_is_no_record(path, before):
    def line(problem, note):
        return Record("running", problem.to_json(), "", note, 0.0).to_line()

    written, older = line(PROBLEM, ""), line(dataclasses.replace(PROBLEM, seed=8), "a long note")
    older = {"no record": b"", "an ended record": b"\n" + older[1:], "a record": older}[before]
    for length in range(1, len(written) - 1):
        path.write_bytes(written[:length] + older[length:])
        assert Record.read(path) is None
    path.write_bytes(written + older[len(written) :])
    assert Record.read(path).problem == PROBLEM.to_json()


def test_a_mixture_of_two_records_in_valid_json_is_no_record(path):
    one, other = (
        Record("running", dataclasses.replace(PROBLEM, seed=seed).to_json(), "", "", 0.0).to_line()
        for seed in (11, 22)
    )
    end = other.rindex(b"22") + 1
    mixed = one[:8] + other[8:end] + one[end:]
    assert json.loads(mixed.partition(b" ")[2])["problem"]["seed"] == 21
    path.write_bytes(mixed)
    assert Record.read(path) is None


def spin(until):
    end = time.monotonic() + 20
    while not until():
        assert time.monotonic() < end


def compiler(function):
    """``function``, called as Triton's compiler calls a stage of the compilation."""
    scope = {}
    source = "def compile(stage):\n    return stage()\n"
    exec(compile(source, "/x/triton/compiler/compiler.py", "exec"), scope)
    return lambda: scope["compile"](function)


@pytest.fixture
def busy(monkeypatch):
    """Lets a test about CPU time pass on a machine that gives it a hundredth of a core."""
    monkeypatch.setattr(watchdog_module, "WALL", 100)


def test_a_loop_ends_the_process_with_its_stack(path, watchdog_with, busy):
    ended = Ended(path)
    with watchdog_with(seconds=0.2, end=ended).watching(PROBLEM):
        spin(ended.happened.is_set)
    assert ended.code == EXIT_HANG
    assert ended.record.state == "hang"
    assert ended.record.detail.startswith("over 0.2 s of CPU time in one problem (")
    assert ended.record.problem == PROBLEM.to_json()
    assert any("in test_a_loop_ends" in frame for frame in ended.record.stack)


def test_a_problem_that_waits_has_the_limit_by_the_clock(path, watchdog_with):
    ended = Ended(path)
    start = time.monotonic()
    with watchdog_with(seconds=0.2, end=ended).watching(PROBLEM):
        assert ended.happened.wait(10)
    assert time.monotonic() - start >= 0.2 * WALL
    assert ended.record.detail == (
        "over 1 s in one problem (0 s of CPU time in 1 s, and 0 s of compilation)"
    )


def test_threads_that_share_the_work_do_not_make_a_hang(path, watchdog_with, monkeypatch):
    """Eight threads use eight seconds of CPU time in one second."""
    ended = Ended(path)
    clock = time.monotonic
    monkeypatch.setattr(time, "process_time", lambda: 8 * clock())
    with watchdog_with(seconds=4.0, end=ended).watching(PROBLEM):
        time.sleep(1.0)
    assert not ended.happened.is_set()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "thread of autograd"])
def test_a_slow_compilation_is_no_hang(path, watchdog_with, elsewhere):
    ended = Ended(path)
    deadline = time.monotonic() + 0.2 * (WALL + 1)
    work = compiler(lambda: spin(lambda: time.monotonic() > deadline))
    with watchdog_with(seconds=0.2, end=ended).watching(PROBLEM):
        if elsewhere:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    assert not ended.happened.is_set()


def test_a_compilation_that_hangs_has_its_own_limit(path, watchdog_with):
    ended = Ended(path)
    start = time.monotonic()
    with watchdog_with(seconds=0.1, end=ended).watching(PROBLEM):
        thread = threading.Thread(target=compiler(lambda: spin(ended.happened.is_set)))
        thread.start()
        thread.join()
    assert time.monotonic() - start >= 0.1 * COMPILATION
    assert ended.code == EXIT_HANG
    assert ended.record.detail.startswith("over 1 s of compilation in one problem (")
    # The stack of the thread that compiles, not of the thread that waits for it.
    assert any("compiler.py:2 in compile" in frame for frame in ended.record.stack)


def test_a_loop_after_a_compilation_is_a_hang(path, watchdog_with, busy):
    ended = Ended(path)
    with watchdog_with(seconds=0.2, end=ended).watching(PROBLEM):
        compiler(lambda: time.sleep(0.6))()
        spin(ended.happened.is_set)
    assert ended.record.detail.startswith("over 0.2 s of CPU time in one problem (")
    assert "and 0 s of compilation" not in ended.record.detail


def test_time_in_an_inner_problem_counts_towards_the_inner_problem(path, watchdog_with, busy):
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.4, end=ended)
    with watchdog.watching(PROBLEM):
        for _ in range(3):
            deadline = time.monotonic() + 0.25
            with watchdog.watching(OTHER):
                spin(lambda deadline=deadline: time.monotonic() > deadline)
        assert not ended.happened.is_set()
        spin(ended.happened.is_set)
    assert ended.record.problem == PROBLEM.to_json()


def test_an_inner_problem_that_hangs_is_named(path, watchdog_with):
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.2, end=ended)
    with watchdog.watching(PROBLEM), watchdog.watching(OTHER):
        spin(ended.happened.is_set)
    assert ended.record.problem == OTHER.to_json()


# Compiles for a GPU, which needs none, with a listener that hangs.
COMPILES = """
import sys, time
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fa_verify.oracles.problem import Problem
from fa_verify.properties.running.watchdog import Watchdog

@triton.jit
def kernel(pointer):
    tl.store(pointer, 0.0)

triton.knobs.compilation.listener = lambda **facts: time.sleep(100)
with Watchdog(sys.argv[1], seconds=0.2).watching(Problem()):
    triton.compile(ASTSource(kernel, {"pointer": "*fp32"}), target=GPUTarget("cuda", 90, 32))
"""


def test_tritons_compilation_is_told_from_a_hang_elsewhere(path, tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "compiles.py").write_text(COMPILES)
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "compiles.py"), str(path)],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == EXIT_HANG, done.stderr
    assert "hang: over 2 s of compilation in one problem (" in done.stderr
    assert "compiler.py:" in Record.read(path).stack[0]
    assert "compiles.py:16 in <module>" in Record.read(path).stack[1]


@pytest.mark.parametrize(("file", "function"), COMPILERS)
def test_the_compilers_exist(file, function):
    package, _, rest = file.partition("/")
    installed = importlib.util.find_spec(package)
    if installed is None:
        pytest.skip(f"{package} is not installed")
    source = Path(installed.submodule_search_locations[0], rest).read_text()
    assert f"\ndef {function}(" in source


def test_a_long_problem_has_more_time_for_its_references(path, watchdog_with, monkeypatch):
    monkeypatch.setattr(watchdog_module, "PAIRS", OTHER.M * OTHER.N / 10)
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.05, end=ended)
    deadline = time.monotonic() + 0.5
    with watchdog.watching(OTHER):
        spin(lambda: time.monotonic() > deadline)
    assert not ended.happened.is_set()
    monkeypatch.undo()
    with watchdog.watching(OTHER):
        spin(ended.happened.is_set)
    assert ended.code == EXIT_HANG


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_processes_that_share_a_gpu_have_more_time_for_a_long_problem(
    path, watchdog_with, monkeypatch, device
):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "10")
    monkeypatch.setenv(GPUS_OF_THE_RUN, "0")
    monkeypatch.setattr(watchdog_module, "PAIRS", OTHER.M * OTHER.N)
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.05, end=ended)
    deadline = time.process_time() + 3
    with watchdog.watching(dataclasses.replace(OTHER, device=device)):
        spin(lambda: ended.happened.is_set() or time.process_time() > deadline)
    assert ended.happened.is_set() == (device == "cpu")


def test_problems_that_are_not_overdue_do_not_add_up(path, watchdog_with):
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.2, end=ended)
    for _ in range(3 * WALL):
        with watchdog.watching(PROBLEM):
            time.sleep(0.1)
    assert not ended.happened.is_set()


def test_the_watchdog_waits_for_a_problem_that_starts_late(path, watchdog_with):
    ended = Ended(path)
    watchdog = watchdog_with(seconds=0.2, end=ended)
    with watchdog.watching(PROBLEM):
        time.sleep(0.3)
    start = time.monotonic()
    with watchdog.watching(OTHER):
        assert ended.happened.wait(10)
    assert time.monotonic() - start >= 0.2 * WALL
    assert ended.record.problem == OTHER.to_json()


def test_the_watchdog_sleeps_between_its_looks(watchdog_with):
    watchdog = watchdog_with(seconds=0.2)
    with watchdog.watching(PROBLEM):
        pass
    time.sleep(0.3)
    start = time.process_time()
    time.sleep(0.5)
    # Seconds of CPU: polling would take most of the 0.5.
    assert time.process_time() - start < 0.05


def test_a_sticky_error_ends_the_process(path, watchdog_with, capfd):
    ended = Ended(path)
    watchdog = watchdog_with(sticky=lambda error: "illegal" in str(error), end=ended)
    with pytest.raises(RuntimeError), watchdog.watching(PROBLEM, "backward"):
        raise RuntimeError("an illegal memory access\nand advice")
    assert ended.code == EXIT_CUDA_ERROR
    assert ended.record.state == "cuda error"
    assert ended.record.detail == "RuntimeError: an illegal memory access"
    said = capfd.readouterr().err
    assert "cuda error: RuntimeError: an illegal memory access" in said
    assert f"pytest --fa-replay='{PROBLEM.to_json()}'" in said


def test_other_errors_do_not_end_the_process(path, watchdog_with):
    ended = Ended(path)
    watchdog = watchdog_with(sticky=lambda error: False, end=ended)
    with pytest.raises(RuntimeError, match="refused"), watchdog.watching(PROBLEM):
        raise RuntimeError("refused")
    assert ended.code is None


def fails():
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("used", "synchronize", "sticky"),
    [(True, fails, True), (True, lambda: None, False), (False, fails, False)],
    ids=["lost", "alive", "unused"],
)
def test_the_gpu_says_whether_an_error_is_sticky(monkeypatch, used, synchronize, sticky):
    cuda = SimpleNamespace(is_initialized=lambda: used, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert sticky_cuda_error(RuntimeError("whatever")) is sticky


def test_no_context_is_lost_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert sticky_cuda_error(RuntimeError("whatever")) is False


# An endless sum holds the global interpreter lock, so that no Python thread runs.
HOLDS_THE_LOCK = """
import itertools, sys
from fa_verify.oracles.problem import Problem
from fa_verify.properties.running import watchdog
watchdog.GRACE = 0.5
with watchdog.Watchdog(sys.argv[1], seconds=0.5).watching(Problem()):
    sum(itertools.repeat(0))
"""


def test_a_hang_that_holds_pythons_lock_ends_too(path):
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert Record.read(path).problem == Problem().to_json()


def test_watching_a_problem_costs_little_more_than_its_record(path, watchdog_with):
    watchdog = watchdog_with()

    def watch():
        with watchdog.watching(PROBLEM):
            pass

    def write():
        record = Record("running", PROBLEM.to_json(), "test", "", time.time())
        os.pwrite(file, record.to_line(), 0)
        os.pwrite(file, b"\n", 0)

    # In turns, since a machine's speed changes; CPU time, since other processes add to the clock.
    costs = {watch: [], write: []}
    with (path.parent / "plain.json").open("w") as opened:
        file = opened.fileno()
        for _ in range(20):
            for work, seconds in costs.items():
                start = time.thread_time()
                for _ in range(100):
                    work()
                seconds.append(time.thread_time() - start)
    assert min(costs[watch]) < 3 * min(costs[write])
