"""Processes that share a GPU take much of its memory in turn."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import accuracy
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.registry import KINDS
from fa_verify.properties.running import large_memory as module
from fa_verify.properties.running.large_memory import (
    free_memory,
    large_memory,
    leaves_room,
    limit_memory,
    no_room,
    refusal_without_room,
)
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.workers import GPUS_OF_THE_RUN
from fa_verify.properties.search.search import Runner

FREE = 2**30


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """The free bytes of a GPU's memory, one for each question; the last one stays."""
    answers = [FREE]
    monkeypatch.setattr(module, "_waited", 0.0)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: (answers.pop(0) if answers[1:] else answers[0], FREE)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return answers


def test_a_second_block_for_the_same_gpu_waits_for_the_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-large-memory")
    entered = threading.Event()

    def second():
        with large_memory("cuda", 0):
            entered.set()

    thread = threading.Thread(target=second)
    with large_memory("cuda", 0):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


def test_blocks_for_other_gpus_do_not_wait(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-one-gpu")
    with large_memory("cuda", 0):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-another-gpu")
        with large_memory("cuda", 0), large_memory("cpu", 0), large_memory("cpu", 0):
            pass


def test_a_block_waits_until_enough_memory_is_free(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-free-memory")
    memory[:0] = [0, FREE // 2]
    with large_memory("cuda", FREE) as has_room:
        assert has_room
        assert memory == [FREE]


def test_a_block_does_not_wait_for_memory_for_ever(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-missing-memory")
    monkeypatch.setattr(module, "_PATIENCE", 0.3)
    with large_memory("cuda", 2 * FREE) as has_room:
        assert not has_room
        assert memory == [FREE]


def test_a_block_that_waits_for_memory_lets_another_go_first(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-turns")
    entered = threading.Event()

    def large():
        with large_memory("cuda", 2 * FREE):
            entered.set()

    thread = threading.Thread(target=large)
    thread.start()
    while not module._waited:
        time.sleep(0.01)
    begin = time.monotonic()
    with large_memory("cuda", FREE):
        assert time.monotonic() - begin < 5
    assert not entered.is_set()
    memory[:] = [2 * FREE]
    thread.join(10)
    assert entered.is_set()


def test_the_waits_of_a_process_share_their_patience(monkeypatch, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-patience")
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    begin = time.monotonic()
    for _ in range(20):
        with large_memory("cuda", 2 * FREE):
            pass
    assert time.monotonic() - begin < 5


def test_a_process_frees_its_cache_before_it_waits_for_another(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-of-a-cache")
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(module.fcntl, "flock", lambda *_: events.append("lock"))
    with large_memory("cuda", 0):
        assert events == ["empty", "lock"]


@pytest.mark.parametrize(("workers", "fits"), [("1", True), ("16", False)])
def test_a_test_leaves_room_for_workers_that_have_just_begun(workers, fits, monkeypatch):
    """A test with 60 of 80 GiB took the memory that others needed seconds later."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    monkeypatch.delenv(GPUS_OF_THE_RUN, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79 * FREE, 80 * FREE))
    assert leaves_room(60 * FREE) == fits
    assert leaves_room(40 * FREE)


@pytest.fixture
def fraction(monkeypatch):
    """The fractions of the GPU's memory that were set."""
    found: list[float] = []
    monkeypatch.setattr(module, "_limit", None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**28)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * FREE, 80 * FREE))
    return found


def test_a_process_keeps_to_its_share_of_a_limit(fraction):
    limit_memory(20.0, 4)
    assert fraction == [4.5 / 80]  # a context takes half of a GiB
    assert free_memory() == int(4.25 * FREE)
    with pytest.raises(ValueError, match="6 GiB for 16 processes; needs 1 GiB for each"):
        limit_memory(6.0, 16)


def test_a_block_does_not_wait_for_more_than_the_limit(fraction, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 60.0)
    limit_memory(20.0, 4)
    with large_memory("cuda", 5 * FREE):
        pass


@pytest.mark.parametrize("place", ["kernel", "oracle"])
def test_a_problem_that_needs_more_than_the_limit_is_refused(place, fraction, monkeypatch):
    def fails(*arguments, **keywords):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    runner = Runner(Subject.of(fails, "fails"), Tally())
    if place == "oracle":
        failing = KINDS["attention"]._replace(run=fails)
        monkeypatch.setitem(KINDS, "attention", failing)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            runner.findings(Problem(), accuracy)
    else:
        # Without a limit, it is the kernel that takes too much.
        [finding] = runner.findings(Problem(), accuracy)
        assert "OutOfMemoryError" in finding.told
    limit_memory(20.0, 4)
    assert not runner.findings(Problem(), accuracy)
    [reason] = runner.refusals
    assert reason == "needs more than the 4.5 GiB that --fa-gpu-memory leaves a process"


@pytest.mark.parametrize("asked", ["512 bytes", "20.00 MiB", "3.20 GiB"])
def test_a_problem_that_other_processes_leave_no_room_is_refused(asked, fraction):
    def fails(*arguments, **keywords):
        raise torch.cuda.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 80 GiB"
        )

    runner = Runner(Subject.of(fails, "fails"), Tally())
    assert not runner.findings(Problem(), accuracy)
    [reason] = runner.refusals
    assert reason.startswith("finds less than 4 GiB of the GPU, because other processes hold")


@pytest.mark.parametrize(
    ("asked", "raised"), [("128.00 MiB", NotImplementedError), ("5.00 GiB", torch.OutOfMemoryError)]
)
def test_an_oracle_that_finds_no_room_is_no_failure(asked, raised, fraction):
    with pytest.raises(raised, match=r"other processes hold|Tried"), refusal_without_room():
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}.")


@pytest.mark.parametrize(
    ("free", "told"), [(3 * FREE, "other processes hold"), (4 * FREE, "CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_a_handle_of_cublas_finds_no_room(free, told, fraction, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * FREE))
    # NotImplementedError is a RuntimeError, so that the text tells them apart.
    with pytest.raises(RuntimeError, match=told), refusal_without_room():
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")


@pytest.mark.parametrize("free", [0, 3 * FREE, 4 * FREE])
def test_a_launch_fails_for_lack_of_memory_that_others_hold(free, fraction, monkeypatch):
    def fails(*arguments, **keywords):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * FREE))
    runner = Runner(Subject.of(fails, "fails"), Tally())
    findings = runner.findings(Problem(), accuracy)
    if free < 4 * FREE:
        assert not findings
        [reason] = runner.refusals
        assert reason.startswith("finds less than 4 GiB of the GPU, because other processes hold")
    else:
        [finding] = findings
        assert "Triton Error [CUDA]: out of memory" in finding.told


def test_a_kernel_that_takes_more_than_a_worker_has_is_to_blame(fraction):
    def fails(*arguments, **keywords):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.30 GiB.")

    [finding] = Runner(Subject.of(fails, "fails"), Tally()).findings(Problem(), accuracy)
    assert "OutOfMemoryError" in finding.told


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocator_keeps_to_the_limit(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(module, "_limit", None)
    torch.cuda.empty_cache()
    try:
        limit_memory(torch.cuda.memory_reserved() / FREE + 2.5, 1)
        room = free_memory()
        assert FREE < room <= 2 * FREE
        with pytest.raises(torch.cuda.OutOfMemoryError) as error:
            torch.empty(3 * FREE, dtype=torch.uint8, device="cuda")
        assert no_room(error.value)
        del error
        torch.empty(FREE, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_that_outlives_a_test_keeps_no_other_memory(monkeypatch, gpu_memory):
    monkeypatch.undo()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gpu_memory(2)
    outlives = torch.empty(2**22, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < FREE
    del outlives
